"""A measured step beside the sum of its layers: the sums, the table, and what a profile may say."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, Group

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.profile import (
    MeasuredStep,
    Profile,
    RankStep,
    StageRecord,
    StaticBytes,
)
from megatron_autorecompute.report.terminal import measured_step_view, sums_of_layers

LLAMA = Path(__file__).parents[2] / "examples" / "profiles" / "llama3-70b.json"
GIB = 1 << 30
STATIC = StaticBytes(parameter_bytes=3 * GIB)


def profile_of(*ranks, layout, policy="full*60,none*20"):
    stages = tuple(
        # Residuals are what steps showed above the sums, so they must not be in the sums.
        StageRecord(
            tuple(i for chunk in chunks for i in chunk.layers),
            STATIC,
            residual_bytes=GIB,
            residual_ms=5.0,
        )
        for chunks in layout.stages
    )
    step = MeasuredStep(9, policy, 4, ranks)
    return replace(Profile.load(LLAMA), stages=stages, measured_step=step)


@pytest.fixture(scope="module")
def four():
    return Layout.from_flags(80, 4)


@pytest.fixture(scope="module")
def plan(four):
    ranks = [RankStep(i, i // 5, 10.0 * i + 2000, 3.0, 1.5, 2 * GIB, None) for i in range(20)]
    return make_plan(Problem(profile_of(*ranks, layout=four), four, Schedule(4, 1, 8)).at(70 * GIB))


def shown(plan):
    text = io.StringIO()
    Console(file=text, width=80).print(Group(*measured_step_view(plan)))
    return text.getvalue().splitlines()


def test_sums_are_of_the_step_that_was_measured_without_residuals(plan):
    (kind,) = plan.profile.kinds
    full, none = kind.record("full"), kind.record("none")
    sums = sums_of_layers(plan)
    assert sums[1].forward_ms == pytest.approx((20 * full.forward_ms,))
    assert sums[1].backward_ms == pytest.approx((20 * full.backward_ms,))
    head_ms = plan.profile.head.forward_ms
    assert sums[3].forward_ms == pytest.approx((20 * none.forward_ms + head_ms,))
    assert f" {4 * 20 * full.forward_ms:,.1f} " in "\n".join(shown(plan))
    assert sums[0].peak.bytes > sums[1].peak.bytes > STATIC.total_bytes
    bare = [replace(stage, residual_bytes=0, residual_ms=0.0) for stage in plan.profile.stages]
    assert sums_of_layers(replace(plan, profile=replace(plan.profile, stages=tuple(bare)))) == sums


def test_the_slowest_rank_of_each_stage_is_shown_within_80_columns(plan):
    lines = shown(plan)
    rows = [line.split() for line in lines if "/" in line and line.lstrip()[0].isdigit()]
    assert [row[0] for row in rows] == ["4/0", "9/1", "14/2", "19/3"]
    assert [row[2] for row in rows] == ["2,040", "2,090", "2,140", "2,190"]
    assert "Of 20 ranks" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_a_measured_step_of_another_layout_is_said_to_be_and_not_shown(plan):
    eight = Layout.from_flags(80, 8)
    anew = replace(plan.profile, stages=(), measured_step=None)
    other = make_plan(Problem(anew, eight, Schedule(8, 1, 8)).at(70 * GIB))
    other = replace(other, profile=plan.profile)
    assert "was measured with other layers" in " ".join(shown(other))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recompute_policy": "full*79"}, "the model has 80"),
        ({"recompute_policy": "selective[moe]"}, "no record"),
        ({"num_microbatches": 0}, "measured_step.num_microbatches: 0"),
        ({"ranks": [{"rank": 0, "stage": 4}]}, "there are 4 stages"),
        ({"ranks": [{"rank": 0, "stage": 0, "optimizer_ms": -1.0}]}, "ranks[0].optimizer_ms: -1.0"),
    ],
)
def test_a_measured_step_that_cannot_be_is_refused(plan, change, said):
    data = json.loads(plan.profile.to_json())
    data["measured_step"].update(change)
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(json.dumps(data))
    assert said in str(caught.value)
