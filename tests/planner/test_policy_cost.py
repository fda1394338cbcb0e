import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts, evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, StageRecord, StaticBytes
from tests.planner.definitions import chunk_policies, simulate
from tests.planner.random_profiles import drawn
from tests.planner.uniform_profiles import FULL, NONE, peak_of, uniform_profile


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_peaks_equal_an_event_by_event_simulation(seed, rng):
    profile, layout, schedule, _ = drawn(seed)
    layers = [None] * profile.num_layers
    chosen = []
    for chunks in layout.stages:
        chosen.append([rng.choice(list(chunk_policies(profile, c.layers))) for c in chunks])
        for chunk, policies in zip(chunks, chosen[-1], strict=True):
            for layer, policy in zip(chunk.layers, policies, strict=True):
                layers[layer] = policy
    cost = evaluate(profile, layout, schedule, RecomputePolicy(tuple(layers)))
    for stage in cost.stages:
        peak, time_ms = simulate(profile, layout, schedule, stage.stage, chosen[stage.stage])
        assert stage.peak.bytes == stage.peak.breakdown.total_bytes == peak
        assert stage.busy_ms == pytest.approx(schedule.num_microbatches * time_ms)


def test_time_splits_into_ideal_imbalance_and_recompute():
    head = ChoiceRecord("none", 0, 0, 0, 3.0, 9.0)
    profile = uniform_profile(4, NONE, FULL, head=head)
    policy = RecomputePolicy.parse("full*1,none*3", num_layers=4)
    cost = evaluate(profile, Layout.from_flags(4, 2), Schedule(2, 1, 8), policy)
    first, last = cost.stages
    assert first.ideal_ms == last.ideal_ms == pytest.approx(8 * (4 * 30 + 12) / 2)
    assert first.imbalance_ms == pytest.approx(-8 * 6)
    assert last.imbalance_ms == pytest.approx(8 * 6)
    assert (first.recompute_ms, last.recompute_ms) == (pytest.approx(80), pytest.approx(0))
    assert first.busy_ms == pytest.approx(8 * 70)


def test_equal_stages_take_the_time_of_narayanan_et_al():
    # (b'/b + p - 1) * (t_f(b) + t_b(b)), b' / b being the number of microbatches.
    profile = uniform_profile(8, NONE)
    for p, m in ((1, 6), (2, 6), (4, 9), (8, 8)):
        policy = RecomputePolicy.parse("none", num_layers=8)
        cost = evaluate(profile, Layout.from_flags(8, p), Schedule(p, 1, m), policy)
        assert cost.step_ms == pytest.approx((m + p - 1) * 30.0 * 8 / p)
        assert cost.bubble_ms == pytest.approx((p - 1) * 30.0 * 8 / p)


def test_a_policy_or_layout_of_another_model_is_refused():
    profile = uniform_profile(4, NONE, FULL)
    policy = RecomputePolicy.parse("none", num_layers=4)
    with pytest.raises(ProfileError, match="The layout has 6 layers"):
        evaluate(profile, Layout.from_flags(6, 2), Schedule(2, 1, 4), policy)
    with pytest.raises(ProfileError, match="the schedule 4 of 1"):
        evaluate(profile, Layout.from_flags(4, 2), Schedule(4, 1, 4), policy)
    with pytest.raises(PolicyError, match="covers 5 layers"):
        evaluate(
            profile,
            Layout.from_flags(4, 2),
            Schedule(2, 1, 4),
            RecomputePolicy.parse("none", num_layers=5),
        )
    with pytest.raises(ProfileError, match=r"no record of selective\[mlp\] for layer 0"):
        peak_of(profile, Layout.from_flags(4, 2), Schedule(2, 1, 4), "selective[mlp]")


@pytest.mark.parametrize("residual_ms", [6.0, -6.0, -1000.0])
@pytest.mark.parametrize(("p", "v"), [(1, 1), (2, 1), (2, 4)])
def test_a_residual_is_spread_over_a_stages_events_and_leaves_none_below_zero(p, v, residual_ms):
    profile = uniform_profile(8, NONE, FULL)
    layout = Layout.from_flags(8, p, v)
    stages = tuple(
        StageRecord(
            tuple(layer for chunk in chunks for layer in chunk.layers),
            StaticBytes(),
            residual_ms=residual_ms,
        )
        for chunks in layout.stages
    )
    policy = RecomputePolicy.parse("none*7,full*1", num_layers=8)
    schedule = Schedule(p, v, 4)
    plain = evaluate(profile, layout, schedule, policy)
    cost = evaluate(replace(profile, stages=stages), layout, schedule, policy)
    for before, after in zip(plain.stages, cost.stages, strict=True):
        # Of layers whose least is 30 ms, a third of it forward; 10 ms more are full's.
        least = 30 * 8 / p
        given = max(residual_ms, -least)
        assert after.busy_ms - before.busy_ms == pytest.approx(4 * given)
        moved = [new - old for new, old in zip(after.forward_ms, before.forward_ms, strict=True)]
        assert moved == pytest.approx([given / 3 / v] * v)
        assert min(*after.forward_ms, *after.backward_ms) >= 0


@pytest.mark.parametrize("seed", range(10))
def test_a_policy_costs_the_same_whatever_was_costed_before(seed):
    profile, layout, schedule, _ = drawn(seed)
    costs, rng = PolicyCosts(profile, layout, schedule), random.Random(seed)
    policies = []
    for _ in range(6):
        layers = {}
        for chunk in itertools.chain.from_iterable(layout.stages):
            chosen = rng.choice(list(chunk_policies(profile, chunk.layers)))
            layers |= dict(zip(chunk.layers, chosen, strict=True))
        policies.append(
            RecomputePolicy(tuple(layers[layer] for layer in range(profile.num_layers)))
        )
    # Three are replayed together before they are asked for.
    costs.replay(policies[3:])
    for policy in policies:
        assert costs.of(policy) == evaluate(profile, layout, schedule, policy)
