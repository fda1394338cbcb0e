"""Which layers recompute ahead: against all that could."""

import itertools
import random
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError, PolicyError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.two_clocks import of_clock
from megatron_autorecompute.planner.plan import Plan, make_plan, plan_early_if_it_pays
from megatron_autorecompute.planner.search.manual import fits
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostTimes
from megatron_autorecompute.report.timeline import timeline
from tests.planner.random_profiles import drawn
from tests.planner.uniform_profiles import FULL, NONE, peak_of, uniform_profile

LAYERS = 8


def problem_of(budget, p=4, m=8, **options):
    profile = uniform_profile(LAYERS, NONE, FULL, boundary_bytes=4)
    allowed = options.pop("allowed", ("ahead",))
    return Problem(profile, Layout.from_flags(LAYERS, p), Schedule(p, 1, m), budget, None, allowed)


def all_policies(problem):
    """Every mixture of all choices and of what begins early."""
    kinds = [problem.table.choices(layer) for layer in range(problem.profile.num_layers)]
    for choices in itertools.product(*kinds):
        full = [n for n, choice in enumerate(choices) if choice.granularity == "full"]
        for marks in itertools.product([False, True], repeat=len(full)):
            layers = list(choices)
            for layer, ahead in zip(full, marks, strict=True):
                layers[layer] = replace(layers[layer], ahead=ahead)
            yield RecomputePolicy(tuple(layers))


def small_problems():
    for seed in range(400):
        profile, layout, schedule, budget = drawn(seed)
        has_none = all(kind.record("none") for kind in profile.kinds)
        if layout.num_stages > 1 and profile.num_layers <= 4 and has_none:
            yield Problem(profile, layout, schedule, budget, None, ("ahead",))


def test_no_choices_make_a_shorter_step_than_the_bound_and_none_is_slower_with_more_choices():
    count, shorter, best = 0, 0, 0
    for problem in small_problems():
        try:
            found = solve(problem)
        except InfeasibleError:
            continue
        plain = solve(replace(problem, allowed=None))
        truth = min(
            problem.cost(policy).step_ms
            for policy in all_policies(problem)
            if fits(problem, policy)
        )
        step_ms, bound_ms = found.cost.step_ms, found.step_evidence.bound_ms
        assert bound_ms <= truth * (1 + 1e-12)
        assert truth <= step_ms * (1 + 1e-12)
        assert step_ms <= plain.cost.step_ms
        assert fits(problem, found.policy)
        count, shorter = count + 1, shorter + (truth < plain.cost.step_ms * (1 - 1e-9))
        best += step_ms <= truth * (1 + 1e-9)
    assert count >= 20
    assert shorter >= 3
    assert best >= 0.8 * count, (best, count)


@pytest.mark.long
def test_a_larger_budget_makes_no_slower_plan():
    begun, count = 0, 0
    for problem in [problem_of(1 << 40), *itertools.islice(small_problems(), 3)]:
        stages = problem.at(1 << 40).stages
        low = max(choice.peak_bytes for choice in stages.leanest)
        high = max(low + 1, *(choice.peak_bytes for choice in stages.fastest))
        steps = []
        for number in range(12):
            found = solve(problem.at(low + (high - low) * number // 11))
            steps.append(found.cost.step_ms)
            begun += found.policy.is_ahead
        assert steps == sorted(steps, reverse=True)
        count += 1
    assert count == 4
    assert begun > 6, begun


@pytest.mark.long
def test_nor_does_it_where_stages_and_choices_are_many():
    some = ChoiceRecord("selective[mlp]", 45, 10, 60, 10.0, 24.0)
    profile = uniform_profile(32, NONE, some, FULL, boundary_bytes=4)
    layout, schedule = Layout.from_flags(32, 8), Schedule(8, 1, 16)
    problem = Problem(profile, layout, schedule, 1 << 40, None, ("ahead",))
    found = [solve(problem.at(budget)) for budget in (853, 927)]
    assert all(each.policy.is_ahead for each in found)
    assert found[1].cost.step_ms <= found[0].cost.step_ms


def test_what_begins_early_counts_from_the_wait_to_its_backward():
    """Two layers a stage. `full` holds 4 and takes 130 while its backward runs; the recompute holds
    what `none` does, 100, but the checkpoint's input. A recomputed output, one boundary tensor of
    4, is gone in the backward. In the first layer's backward that of the chunk's output is not."""
    profile = uniform_profile(4, NONE, FULL, boundary_bytes=4)
    layout, schedule = Layout.from_flags(4, 2), Schedule(2, 1, 4)
    early = 100 - 4
    plain = peak_of(profile, layout, schedule, "full").bytes
    one = peak_of(profile, layout, schedule, "full*1,full+ahead*1,full*2").bytes
    both = peak_of(profile, layout, schedule, "full+ahead*2,full*2").bytes
    assert one == plain
    assert both == plain - 4 + early
    last = peak_of(profile, layout, schedule, "full*2,full+ahead*2", stage=1)
    assert last == peak_of(profile, layout, schedule, "full*4", stage=1)


def test_only_what_shortens_the_step_begins_early():
    everything = RecomputePolicy.parse("full+ahead", num_layers=LAYERS)
    assert problem_of(1 << 30).cost(everything).ahead_ms == 3 * 20.0  # (p - 1) R
    leanest = max(choice.peak_bytes for choice in problem_of(1 << 40).stages.leanest)
    for more in (0, 100, 400):
        problem = problem_of(leanest + more)
        policy = solve(problem).policy
        assert policy.is_ahead
        for layer, choice in enumerate(policy.layers):
            if choice.ahead:
                layers = list(policy.layers)
                layers[layer] = replace(choice, ahead=False)
                fewer = RecomputePolicy(tuple(layers))
                assert problem.cost(fewer).step_ms > problem.cost(policy).step_ms
        assert not any(choice.ahead for choice in policy.layers[-2:])


def test_nothing_begins_early_unless_it_is_asked_for():
    tight = max(choice.peak_bytes for choice in problem_of(1 << 40).stages.leanest) + 100
    assert solve(problem_of(tight)).policy.is_ahead
    assert not solve(problem_of(tight, allowed=None)).policy.is_ahead
    assert not solve(problem_of(tight, allowed=("none", "full"))).policy.is_ahead
    assert solve(problem_of(tight, allowed=("none", "full", "ahead"))).policy.is_ahead
    with pytest.raises(PolicyError, match="as ahead"):
        solve(problem_of(tight, allowed=("full+ahead",)))


def test_with_the_clock_of_the_host_a_step_is_no_shorter_than_by_either_clock():
    rng, hidden = random.Random(3), 0
    for problem in small_problems():
        if not all(kind.record("full") for kind in problem.profile.kinds):
            continue
        kinds = tuple(_launched(rng, kind) for kind in problem.profile.kinds)
        both = replace(problem, profile=replace(problem.profile, kinds=kinds))
        marked = RecomputePolicy.parse("full+ahead", num_layers=both.profile.num_layers)
        in_time = RecomputePolicy(tuple(choice.in_time for choice in marked.layers))
        early, later = both.cost(marked), both.cost(in_time)
        for host in (False, True):
            alone = replace(both, profile=of_clock(both.profile, host))
            assert alone.cost(marked).step_ms <= early.step_ms * (1 + 1e-12)
        assert early.step_ms <= later.step_ms * (1 + 1e-12)
        assert early.ahead_ms == pytest.approx(later.step_ms - early.step_ms, abs=1e-9)
        hidden += early.is_host_bound and early.ahead_ms > 0
    assert hidden > 5


def _launched(rng, kind):
    """A kind of layer with times of the host, whose recompute is another share of them."""
    share, again, none = rng.uniform(0.3, 3), rng.random(), kind.record("none")
    none_ms = none.forward_ms + none.backward_ms
    more = [again * (r.forward_ms + r.backward_ms - none_ms) for r in kind.choices]
    hosts = [HostTimes(share * none.forward_ms, share * (none.backward_ms + m)) for m in more]
    both = zip(kind.choices, hosts, strict=True)
    return replace(kind, choices=tuple(replace(r, host=host) for r, host in both))


@pytest.mark.parametrize(("spread_ms", "is_sure"), [(0.0, True), (0.1, True), (10.0, False)])
def test_auto_lets_recompute_begin_early_where_that_pays_more_than_times_err(spread_ms, is_sure):
    choices = (replace(choice, spread_ms=spread_ms) for choice in (NONE, FULL))
    profile = uniform_profile(LAYERS, *choices, boundary_bytes=4)
    tight = max(choice.peak_bytes for choice in problem_of(1 << 40).stages.leanest) + 100
    problem = Problem(profile, Layout.from_flags(LAYERS, 4), Schedule(4, 1, 8), tight)
    plan = plan_early_if_it_pays(problem)
    assert plan.policy.is_ahead == is_sure
    if plan.step_interval is not None and is_sure:
        assert plan.step_interval.high_ms < make_plan(problem).cost.step_ms


def test_a_plan_file_keeps_what_begins_early(tmp_path):
    tight = max(choice.peak_bytes for choice in problem_of(1 << 40).stages.leanest) + 100
    plan = make_plan(problem_of(tight))
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.policy == plan.policy
    assert read.policy.is_ahead
    assert read.cost == plan.cost
    step = timeline(read)
    assert step.step_ms == pytest.approx(plan.cost.step_ms)
    for drawn_stage, cost in zip(step.stages, plan.cost.stages, strict=True):
        assert drawn_stage.peak_bytes.max() == cost.peak.bytes
