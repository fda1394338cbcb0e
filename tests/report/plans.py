"""Small plans to look at."""

import functools
from pathlib import Path

from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.units import GIB
from tests.planner.random_profiles import problem

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


THREE = {
    "gpt-760m-48l": ("gpt-760m-48l", 4, 2, 16, 20),
    "llama3-70b": ("llama3-70b", 4, 5, 16, 20),
    "moe-16b": ("moe-16b", 2, 1, 8, 20),
}
"""Arguments for a plan of each example profile that recomputes something."""
