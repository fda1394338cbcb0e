"""Small plans to look at."""

import functools
from pathlib import Path

from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.plan import CurvePoint, make_plan
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.profile import ChoiceRecord, Profile
from megatron_autorecompute.report.data import Curve, Paste, ReportData, report_data
from megatron_autorecompute.report.timeline import timeline
from megatron_autorecompute.units import GIB
from tests.planner.random_profiles import problem
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "profiles"


def random_plan(seed):
    """A plan of a small random model; where its budget is too small, under any budget."""
    profile, layout, schedule, budget = problem(seed)
    planner = Planner(profile, layout, schedule)
    return make_plan(planner, budget if planner.try_solve(budget) else 1 << 40)


@functools.cache
def example_plan(name, pp, vp, num_microbatches, budget_gib):
    """A plan of one of the example profiles."""
    profile = Profile.load(EXAMPLES / f"{name}.json")
    layout = Layout.from_flags(
        profile.model.num_layers, pp, vp, mtp_num_layers=profile.model.mtp_num_layers
    )
    schedule = Schedule(pp, vp, num_microbatches)
    return make_plan(Planner(profile, layout, schedule), int(budget_gib * GIB))


@functools.cache
def example_data(*args):
    """What the report of an example plan shows."""
    return report_data(example_plan(*args))


@functools.cache
def long_step():
    """What the report shows of 126 layers, 16 stages, 8 chunks, 256 microbatches: 65,536 events."""
    layers, pp, vp, microbatches = 126, 16, 8, 256
    head = ChoiceRecord("none", 7, 3, 5, 1.23456, 2.34567)
    profile = uniform_profile(layers, NONE, FULL, head=head, boundary_bytes=3)
    layout = Layout.from_flags(
        layers,
        pp,
        vp,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    plan = make_plan(Planner(profile, layout, Schedule(pp, vp, microbatches)), 11_000)
    point = CurvePoint(11_000, plan.cost.step_ms, 11_000, plan.policy.format())
    paste = (Paste("here", plan.policy.format()),)
    curve = Curve("", (point,), ())
    return ReportData(plan, timeline(plan), ((),) * layers, curve, paste)


THREE = {
    "gpt-760m-48l": ("gpt-760m-48l", 4, 2, 16, 20),
    "llama3-70b": ("llama3-70b", 4, 5, 16, 20),
    "moe-16b": ("moe-16b", 2, 1, 8, 20),
}
"""Arguments for a plan of each example profile that recomputes something."""
