"""Small plans to look at."""

import functools
import random
from dataclasses import replace
from pathlib import Path

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import try_solve
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostLink, OffloadGroup, Profile
from megatron_autorecompute.report.data import Curve, ReportData, report_data
from megatron_autorecompute.report.timeline import timeline
from megatron_autorecompute.units import GIB
from tests.planner.random_profiles import drawn
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "profiles"


@functools.cache
def random_plan(seed):
    """A plan of a small random model; where its budget is too small, under any budget."""
    profile, layout, schedule, budget = drawn(seed)
    problem = Problem(profile, layout, schedule)
    return make_plan(problem.at(budget if try_solve(problem.at(budget)) else 1 << 40))


@functools.cache
def early_plan():
    """Of four stages, some of which begin recompute early."""
    profile = uniform_profile(8, NONE, FULL, boundary_bytes=4)
    problem = Problem(profile, Layout.from_flags(8, 4), Schedule(4, 1, 8))
    tight = max(choice.peak_bytes for choice in problem.at(1 << 40).stages.leanest) + 100
    return make_plan(replace(problem.at(tight), allowed=("ahead",)))


@functools.cache
def copying_plan(seed):
    """Of two stages, on one or two chunks each, that offload at random over a slow link."""
    rng = random.Random(seed)
    moved = rng.randint(10, 30)
    first, second = sorted(rng.sample(range(101), 2))
    group = OffloadGroup("core_attn", moved, moved, rng.random(), first / 100, second / 100)
    choices = (
        ChoiceRecord("none", 60, 10, 20, 10.0, 20.0),
        ChoiceRecord("selective[mlp]", 40, 10, 30, 10.0, 27.0),
        ChoiceRecord("none+offload[core_attn]", 60 - moved, 9, 50, 10.0, 20.0),
        ChoiceRecord("selective[mlp]+offload[core_attn]", 40 - moved, 8, 60, 10.0, 27.0),
    )
    choices = [replace(c, offload_groups=(group,) * ("offload" in c.choice)) for c in choices]
    rate = moved / rng.uniform(5e6, 40e6)  # a copy takes 5 to 40 ms
    link, chunks = HostLink(rate, rate, 1 << 40), rng.choice([1, 2])
    profile = replace(uniform_profile(8, *choices, boundary_bytes=3), host_link=link)
    problem = Problem(profile, Layout.from_flags(8, 2, chunks), Schedule(2, chunks, 4))
    policy = tuple(rng.choice(choices).choice for _ in range(8))
    cost = problem.cost(RecomputePolicy.parse(",".join(policy), num_layers=8))
    return replace(make_plan(problem.at(1 << 40)), recompute_policy=policy, cost=cost)


@functools.cache
def example_plan(name, pp, vp, num_microbatches, budget_gib):
    """A plan of one of the example profiles."""
    profile = Profile.load(EXAMPLES / f"{name}.json")
    layout = Layout.from_flags(
        profile.model.num_layers, pp, vp, mtp_num_layers=profile.model.mtp_num_layers
    )
    schedule = Schedule(pp, vp, num_microbatches)
    return make_plan(Problem(profile, layout, schedule).at(int(budget_gib * GIB)))


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
    plan = make_plan(Problem(profile, layout, Schedule(pp, vp, microbatches)).at(11_000))
    point = CurvePoint(11_000, plan.cost.step_ms, 11_000, plan.policy.format())
    paste = {plan.policy.format(): "here"}
    curve = Curve("", (point,), ())
    return ReportData(plan, timeline(plan), curve, paste)


THREE = {
    "gpt-760m-48l": ("gpt-760m-48l", 4, 2, 16, 20),
    "llama3-70b": ("llama3-70b", 4, 5, 16, 20),
    "moe-16b": ("moe-16b", 2, 1, 8, 20),
}
"""Arguments for a plan of each example profile that recomputes something."""
