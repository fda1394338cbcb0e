import re
from dataclasses import replace
from xml.etree import ElementTree

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.report.figures import (
    MOST_CELLS,
    choice_colours,
    groups,
    ink_on,
    strip,
    strip_svg,
)
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile
from tests.report.plans import example_plan, random_plan

ONE = Schedule(1, 1, 1)


def titles(svg):
    return re.findall(r"<title>([^<]*)</title>", svg)


def test_every_layer_has_one_cell_with_its_choice_and_so_have_embedding_and_head():
    plan = example_plan("gpt-760m-48l", 4, 2, 16, 20)
    found = titles(strip_svg(plan))
    layers = [f"layer {i}: {choice}" for i, choice in enumerate(plan.recompute_policy)]
    assert sorted(found) == sorted([*layers, "embedding", "head and loss"])


def test_the_picture_stands_by_itself_and_is_well_formed():
    svg = strip_svg(random_plan(5))
    ElementTree.fromstring(svg)
    assert re.findall(r"\bhref=|\bsrc=|url\(|@import", svg) == []


def test_groups_are_the_checkpoints_of_the_policy():
    plan = example_plan("llama3-70b", 4, 5, 16, 20)
    found = [group for chunks in plan.layout.stages for group in groups(plan.policy, chunks)]
    in_groups = sorted(layer for group in found for layer in group)
    assert in_groups == [i for i, c in enumerate(plan.policy.layers) if c.group > 1]
    assert all(len(group) == plan.policy.layers[group[0]].group for group in found)


def test_a_long_stage_goes_on_in_the_next_row():
    layers = 2 * MOST_CELLS
    problem = Problem(uniform_profile(layers, NONE, FULL), Layout.from_flags(layers, 1), ONE)
    figure = strip(make_plan(problem.at(1 << 30)))
    rows = {cell.get_y() for cell in figure.axes[0].patches if cell.get_gid() != "@cell"}
    assert len(rows) == 3  # embedding and head need two cells more


def test_the_more_a_choice_recomputes_the_darker_it_is():
    attention, more = "selective[core_attn]", "selective[core_attn+layernorm+mlp]"
    plan = example_plan("gpt-760m-48l", 4, 2, 16, 20)
    plan = replace(plan, recompute_policy=("none", attention, more, "full", "full/2", "full/2") * 8)
    colours = {str(choice): colour for choice, colour in choice_colours(plan).items()}

    def light(name):
        return sum(int(colours[name][i : i + 2], 16) for i in (1, 3, 5))

    assert light("none") > light(attention) > light(more) > light("full")
    assert colours["full/2"] == colours["full"]
    assert ink_on(colours["none"]) == "#000000"
    assert ink_on(colours["full"]) == "#ffffff"
