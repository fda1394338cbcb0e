import itertools
import random
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shapes import search_shapes
from megatron_autorecompute.planner.search.solve import solve, try_solve, without_offload
from megatron_autorecompute.policy import LayerPolicy, MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostLink, OffloadGroup
from tests.planner.uniform_profiles import uniform_profile


def drawn(seed):
    """A few layers that may keep, recompute, offload, and both."""
    rng = random.Random(seed)
    p, v, layers = rng.choice([(1, 1, 3), (1, 1, 3), (2, 1, 4), (2, 2, 4)])
    held, again = rng.randint(40, 60), rng.randint(1, 9)
    moved, part = rng.randint(10, 30), rng.randint(5, 20)
    begin, end = sorted(rng.sample(range(101), 2))
    group = OffloadGroup("core_attn", moved, moved, rng.random(), begin / 100, end / 100)

    def record(choice, held_bytes, more_ms, groups=()):
        back = rng.randint(0, 30) + sum(g.device_bytes for g in groups)
        return ChoiceRecord(
            choice,
            held_bytes,
            rng.randint(0, 20),
            back,
            10.0,
            20.0 + more_ms,
            offload_groups=groups,
        )

    choices = (
        record("none", held, 0),
        record("selective[mlp]", held - part, again),
        record("none+offload[core_attn]", held - moved, 0, (group,)),
        record("selective[mlp]+offload[core_attn]", max(0, held - part - moved), again, (group,)),
    )
    rate = moved / rng.uniform(2e6, 40e6)  # a copy takes 2 to 40 ms
    link = HostLink(rate, rate * rng.choice([1, 1, 2]), rng.choice([1 << 40, 4 * moved]))
    profile = replace(uniform_profile(layers, *choices, boundary_bytes=3), host_link=link)
    layout = Layout.from_flags(layers, p, v)
    return profile, layout, Schedule(p, v, 2 * p if v > 1 else rng.randint(2, 6)), rng


def brute_force(problem, budget, choices):
    """Milliseconds of the shortest step that fits; None if none does."""
    best = None
    for layers in itertools.product(choices, repeat=problem.profile.num_layers):
        cost = problem.cost(RecomputePolicy(layers))
        fits = all(
            s.peak_high_bytes <= budget and s.host_bytes <= problem.profile.host_link.host_bytes
            for s in cost.stages
        )
        if fits and (best is None or cost.step_ms < best):
            best = cost.step_ms
    return best


def test_a_solution_is_no_farther_from_brute_force_than_it_says():
    proven = same = 0
    for seed in (2, 3, 5, 7):
        profile, layout, schedule, rng = drawn(seed)
        problem = Problem(profile, layout, schedule)
        choices = [LayerPolicy.parse(record.choice) for record in profile.kinds[0].choices]
        most = problem.cost(RecomputePolicy((choices[0],) * profile.num_layers)).peak_high_bytes
        budget = round(most * rng.uniform(0.55, 1.0))
        best, found = brute_force(problem, budget, choices), solve(problem.at(budget))
        bound = found.step_evidence.bound_ms
        assert bound <= best * (1 + 1e-9) <= found.cost.step_ms * (1 + 2e-9)
        proven += found.step_evidence.gap == 0
        same += found.cost.step_ms == pytest.approx(best)
    assert (proven, same) == (1, 3)


@pytest.fixture(scope="module")
def problem():
    """Sixteen layers that recompute dearly; a copy takes less than a layer's backward."""
    group = OffloadGroup("core_attn", 80, 80, 0.5, 0.4, 0.6)
    none = ChoiceRecord("none", 100, 10, 30, 10.0, 20.0)
    again = ChoiceRecord("selective[mlp]", 50, 10, 80, 10.0, 30.0)
    moved = ChoiceRecord(
        "none+offload[core_attn]", 20, 90, 110, 10.0, 20.0, offload_groups=(group,)
    )
    link = HostLink(80 / 15e6, 80 / 15e6, 1 << 40)
    profile = replace(uniform_profile(16, none, again, moved), host_link=link)
    return Problem(profile, Layout.from_flags(16, 4), Schedule(4, 1, 6))


def test_offload_that_hides_is_as_fast_as_keeping_and_the_plan_says_what_it_buys(problem):
    free, plan = solve(problem.at(1 << 40)), make_plan(problem.at(1000))
    assert {str(choice) for choice in free.policy.layers} == {"none"}
    without = solve(without_offload(problem).at(1000))
    assert plan.cost.step_ms == free.cost.step_ms < without.cost.step_ms
    assert plan.step_evidence.gap == 0
    # The last stage has one microbatch in flight and needs no copies.
    assert plan.recompute_policy[12:] == ("none",) * 4
    assert plan.notes[-1].startswith(
        f"With offload the step takes {plan.cost.step_ms:,.1f} ms, of which it waits 0.0 ms"
    )
    assert f"without it {without.cost.step_ms:,.1f} ms, at these budgets" in plan.notes[-1]
    assert Plan.from_json(plan.to_json()) == plan


def test_what_copies_under_way_hold_too_much_costs_little_of_what_offload_buys():
    """Layers as those of a Llama 70B, in MiB, whose best choices with copies for free exceed this
    budget by some copies under way."""
    group = OffloadGroup("core_attn", 144, 144, 0.5, 0.4, 0.6)

    def record(choice, held_bytes, transients, more_ms, groups=()):
        return ChoiceRecord(
            choice, held_bytes, *transients, 7.5, 14.9 + more_ms, offload_groups=groups
        )

    choices = (
        record("none", 1073, (192, 512), 0),
        record("selective[mlp]", 337, (672, 1312), 5.3),
        record("full", 64, (736, 1585), 7.5),
        record("none+offload[core_attn]", 929, (192, 512), 0, (group,)),
        record("selective[mlp]+offload[core_attn]", 193, (672, 1312), 5.3, (group,)),
    )
    profile = uniform_profile(24, *choices, boundary_bytes=64)
    profile = replace(profile, host_link=HostLink(144 / 1.2e6, 144 / 1.2e6, 1 << 40))
    problem = Problem(profile, Layout.from_flags(24, 2), Schedule(2, 1, 8))
    found, without = solve(problem.at(17_934)), solve(without_offload(problem).at(17_934))
    assert found.step_evidence.gap < 0.005
    assert without.cost.step_ms > 1.02 * found.cost.step_ms


def test_where_everything_may_stay_the_plan_has_no_copies_and_says_so(problem):
    assert (
        make_plan(problem.at(1 << 40)).notes[-1].startswith("With offload nothing faster was found")
    )


def test_less_memory_than_recompute_alone_needs(problem):
    least = without_offload(problem).stages.leanest[0].peak_bytes
    found = solve(problem.at(least - 1))
    assert found.cost.peak_high_bytes < least
    with pytest.raises(InfeasibleError):
        solve(without_offload(problem).at(least - 1))
    least = problem.stages.leanest[0].peak_bytes
    with pytest.raises(InfeasibleError, match="only if copies to host memory took no time"):
        solve(problem.at(least))
    with pytest.raises(InfeasibleError, match="even with its leanest choices"):
        solve(problem.at(least - 1))


def test_the_curve_with_offload_is_nowhere_above_the_one_without(problem):
    curve, plain = pareto(problem, 8), pareto(without_offload(problem), 8)
    assert curve[-1].peak_high_bytes <= plain[-1].peak_high_bytes
    for point in plain:
        best = min(p.step_ms for p in curve if p.budget_bytes <= point.peak_high_bytes)
        assert best <= point.step_ms


def test_megatrons_whole_layer_offload_is_taken_where_it_is_the_fastest():
    whole = OffloadGroup("cpu_offloading", 80, 80, 1.0, 0.0, 1.0)
    none = ChoiceRecord("none", 100, 10, 30, 10.0, 20.0)
    again = ChoiceRecord("selective[mlp]", 50, 10, 80, 10.0, 30.0)
    moved = ChoiceRecord(
        "none+offload[cpu_offloading]", 20, 90, 110, 10.0, 20.0, offload_groups=(whole,)
    )
    taken = set()
    for rate in (8e6, 20e6):  # a copy takes 10 or 4 ms
        link = HostLink(80 / 80e6 * rate / 1e7, 80 / 80e6 * rate / 1e7, 1 << 40)
        profile = replace(uniform_profile(8, none, again, moved), host_link=link)
        problem = Problem(profile, Layout.from_flags(8, 1), Schedule(1, 1, 4))
        texts = [f"megatron:cpu_offloading/{n}" for n in range(1, 8)]
        own = [problem.cost(RecomputePolicy.parse(text, num_layers=8)) for text in texts]
        for budget in range(500, 1000, 80):
            fits = [cost.step_ms for cost in own if cost.peak_high_bytes <= budget]
            plain = try_solve(without_offload(problem).at(budget))
            fits += [] if plain is None else [plain.cost.step_ms]
            found = try_solve(problem.at(budget))
            assert (found and found.cost.step_ms) == min(fits, default=None)
            if found is not None:
                assert found.step_evidence.gap == 0
                taken.add(str(found.policy.layers[0]))
                plan = make_plan(problem.at(budget))
                assert Plan.from_json(plan.to_json()) == plan
    assert {"none+offload[cpu_offloading]", "selective[mlp]"} <= taken
    least = min(cost.peak_high_bytes for cost in own)
    assert solve(problem.at(least)).cost.peak_high_bytes == least
    with pytest.raises(InfeasibleError):
        solve(problem.at(least - 1))


@pytest.mark.parametrize("seed", range(20, 26))
def test_no_setting_of_megatrons_that_fits_is_faster(seed):
    profile, layout, schedule, rng = drawn(seed)
    problem = Problem(profile, layout, schedule)
    texts = ["none", "selective[mlp]", "offload[core_attn]", "selective[mlp]+offload[core_attn]"]
    settings = [MegatronStrategy.parse(f"megatron:{text}") for text in texts]
    costs = [problem.cost(one.policy(profile.num_layers)) for one in settings]
    budget = rng.choice(costs).peak_high_bytes
    found = try_solve(problem.at(budget))
    for cost in (*costs, *([] if found is None else [found.cost])):
        host = max(stage.host_bytes for stage in cost.stages)
        if cost.peak_high_bytes <= budget and host <= profile.host_link.host_bytes:
            assert found.cost.step_ms <= cost.step_ms * (1 + 1e-9)
        else:
            assert found is None or cost is not found.cost


@pytest.mark.parametrize("budget", [200, 222])
def test_a_layout_is_found_that_fits_with_its_copies(budget):
    group = OffloadGroup("core_attn", 30, 30, 0.5, 0.4, 0.6)
    none = ChoiceRecord("none", 50, 5, 10, 10.0, 20.0)
    again = ChoiceRecord("selective[mlp]", 35, 5, 25, 10.0, 26.0)
    moved = ChoiceRecord("none+offload[core_attn]", 20, 10, 45, 10.0, 20.0, offload_groups=(group,))
    head = ChoiceRecord("none", 30, 0, 40, 8.0, 16.0)
    plain = uniform_profile(4, none, again, moved, head=head, boundary_bytes=3)
    profile = replace(plain, host_link=HostLink(30 / 12e6, 30 / 12e6, 1 << 40))
    choices = [LayerPolicy.parse(record.choice) for record in (none, again, moved)]
    texts = [f"E{'t' * first}|{'t' * (4 - first)}L" for first in (1, 2, 3)]
    problems = [Problem(profile, Layout.parse(text, 2), Schedule(2, 1, 4)) for text in texts]
    steps = [brute_force(problem, budget, choices) for problem in problems]
    best = min(step for step in steps if step is not None)
    found = search_shapes([problems[1].at(budget)], layouts=True)
    assert found.solution.cost.step_ms == pytest.approx(best)


def test_whole_layers_stay_whole_where_modules_may_leave_too():
    whole = OffloadGroup("cpu_offloading", 80, 80, 1.0, 0.0, 1.0)
    part = OffloadGroup("core_attn", 40, 40, 0.5, 0.4, 0.6)
    none = ChoiceRecord("none", 100, 10, 30, 10.0, 20.0)
    again = ChoiceRecord("selective[mlp]", 5, 10, 120, 10.0, 30.0)
    some = ChoiceRecord("none+offload[core_attn]", 60, 50, 30, 10.0, 20.0, offload_groups=(part,))
    moved = ChoiceRecord(
        "none+offload[cpu_offloading]", 20, 90, 110, 10.0, 20.0, offload_groups=(whole,)
    )
    link = HostLink(80 / 16e6, 80 / 16e6, 1 << 40)  # a layer's copy takes 16 ms
    profile = replace(uniform_profile(8, none, again, some, moved), host_link=link)
    problem = Problem(profile, Layout.from_flags(8, 1), Schedule(1, 1, 4))
    texts = [f"megatron:cpu_offloading/{n}" for n in range(4, 8)]
    own = [problem.cost(RecomputePolicy.parse(text, num_layers=8)) for text in texts]
    for budget in [cost.peak_high_bytes for cost in own]:
        fits = [cost.step_ms for cost in own if cost.peak_high_bytes <= budget]
        assert solve(problem.at(budget)).cost.step_ms <= min(fits)
