"""The table of costs for a job's dashboards."""

import pytest

from megatron_autorecompute.report.cost_table import COSTS, cost_rows, costs_markdown
from tests.report.plans import THREE, example_plan


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
