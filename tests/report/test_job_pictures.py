"""Pictures and tables of a plan for a job's dashboards."""

import numpy as np
import pytest

from megatron_autorecompute.report.figures import choice_colours
from megatron_autorecompute.report.job_pictures import (
    COSTS,
    MOST_LANES,
    cost_rows,
    costs_markdown,
    memory_image,
    policy_image,
)
from tests.report.plans import THREE, example_plan, random_plan


@pytest.mark.parametrize("name", THREE)
def test_the_policys_picture_has_the_colour_of_every_choice(name):
    plan = example_plan(*THREE[name])
    image = policy_image(plan)
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    found = {tuple(pixel) for pixel in np.unique(image.reshape(-1, 3), axis=0).tolist()}
    for colour in choice_colours(plan).values():
        assert tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) in found


def test_the_memory_picture_shows_at_most_so_many_stages():
    small, large = (example_plan("gpt-760m-48l", pp, 1, 16, 30) for pp in (4, 16))
    heights = [memory_image(plan, None).shape[0] for plan in (small, large)]
    assert heights[1] / heights[0] == pytest.approx(MOST_LANES / 4, rel=0.15)


def test_a_measured_peak_is_drawn_in_the_memory_picture():
    plan = example_plan(*THREE["moe-16b"])
    peaks = [cost.peak.bytes for cost in plan.cost.stages]
    orange = (0xD5, 0x5E, 0x00)
    for measured, drawn in ((peaks, True), (None, False)):
        assert (memory_image(plan, measured) == orange).all(axis=2).any() == drawn


@pytest.mark.parametrize("seed", range(6))
def test_any_plan_has_pictures(seed):
    plan = random_plan(seed)
    assert policy_image(plan).size > 0
    assert memory_image(plan, None).size > 0


def test_pictures_leave_the_programs_own_figures_and_backend_alone():
    import matplotlib

    before = matplotlib.get_backend(auto_select=False)
    memory_image(example_plan(*THREE["moe-16b"]), None)
    assert matplotlib.get_backend(auto_select=False) == before


def test_costs_have_a_row_for_every_choice_of_every_kind_as_recorded():
    plan = example_plan(*THREE["moe-16b"])
    rows = [dict(zip(COSTS, row, strict=True)) for row in cost_rows(plan)]
    records = [(kind.name, record) for kind in plan.profile.kinds for record in kind.choices]
    records += [("embedding", plan.profile.embedding), ("head", plan.profile.head)]
    for row, (kind, record) in zip(rows, records, strict=True):
        assert (row["layers"], row["choice"]) == (kind, record.choice)
        assert row["held_bytes"] == record.held_bytes
        assert row["backward_ms"] == record.backward_ms
    assert sum(row["in the plan"] for row in rows[:-2]) == plan.profile.num_layers


@pytest.mark.parametrize("name", THREE)
def test_layers_in_groups_count_as_full(name):
    plan = example_plan(*THREE[name])
    rows = [dict(zip(COSTS, row, strict=True)) for row in cost_rows(plan)[:-2]]
    full = sum(choice.startswith("full") for choice in plan.recompute_policy)
    assert sum(row["in the plan"] for row in rows if row["choice"] == "full") == full


def test_the_table_in_markdown_has_the_figures_with_units():
    head, rule, first, *_ = costs_markdown(example_plan(*THREE["moe-16b"])).splitlines()
    assert head.startswith("| layers | how many | choice | in the plan | held | forward transient")
    assert head.count("|") == rule.count("|") == first.count("|")
    assert first.startswith("| dense | 1 | none | 0 | 368.5 MiB | 48.0 MiB |")
