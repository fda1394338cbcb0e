import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.boundary import decisive_loads, extra_tensors
from megatron_autorecompute.cost_model import (
    CostTable,
    best_uniform_chunks,
    evaluate,
    stage_base,
    timeline,
    uniform_chunk_bytes,
)
from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.pipeline import Layout, Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.unit.random_profiles import chunk_policies, problem, simulate

NOTHING = ChoiceRecord("none", 0, 0, 0, 0.0, 0.0)


def uniform_profile(num_layers, *choices, head=NOTHING, boundary_bytes=0, mtp=0):
    kind = LayerKind("k", tuple(range(num_layers + mtp)), choices, static=StaticBytes())
    return Profile(
        Model("uniform", num_layers, mtp),
        Parallelism(1, 8),
        (kind,),
        embedding=NOTHING,
        head=head,
        boundary_bytes=boundary_bytes,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )


def peak_of(profile, layout, schedule, text, stage=0):
    policy = RecomputePolicy.parse(text, num_layers=profile.num_layers)
    return evaluate(profile, layout, schedule, policy).stages[stage].peak


NONE = ChoiceRecord("none", 100, 10, 30, 10.0, 20.0)
FULL = ChoiceRecord("full", 4, 20, 130, 10.0, 30.0)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_peaks_equal_an_event_by_event_simulation(seed, rng):
    profile, layout, schedule, _ = problem(seed)
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


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_timeline_reaches_the_peak_and_never_exceeds_it(seed):
    profile, layout, schedule, _ = problem(seed)
    fastest = tuple(CostTable(profile).choices(layer)[0] for layer in range(profile.num_layers))
    policy = RecomputePolicy(fastest)
    for stage in evaluate(profile, layout, schedule, policy).stages:
        moments = timeline(profile, layout, schedule, policy, stage.stage)
        highest = max(split.total_bytes for _, split in moments)
        assert highest <= stage.peak.bytes
        if "optimizer" not in stage.peak.moment:
            assert highest == stage.peak.bytes


@settings(max_examples=100)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
)
def test_leaving_out_implied_moments_never_lowers_the_peak(p, v, groups, sizes):
    v = v if p > 1 else 1
    schedule = Schedule(p, v, p * groups)
    for stage in range(p):

        def total(kind, chunk, in_flight, extra):
            waiting = sum(n * size for n, size in zip(in_flight, sizes, strict=False))
            return waiting + sizes[4 + chunk] * (1 if kind == "forward" else 2) + extra * sizes[0]

        rows = zip(
            schedule.events(stage),
            schedule.in_flight(stage).tolist(),
            extra_tensors(schedule, stage),
            strict=True,
        )
        assert max(
            total(load.kind, load.chunk, load.in_flight, load.extra)
            for load in decisive_loads(schedule, stage)
        ) == max(total(e.kind, e.chunk, in_flight, extra) for e, in_flight, extra in rows)


def test_position_matters_an_early_full_layer_replays_when_later_layers_are_freed():
    profile = uniform_profile(4, NONE, FULL)
    layout, schedule = Layout.even(4, 1), Schedule(1, 1, 1)
    early = peak_of(profile, layout, schedule, "full*1,none*3")
    late = peak_of(profile, layout, schedule, "none*3,full*1")
    assert early.bytes == 4 + 3 * 100 + 30
    assert late.bytes == 3 * 100 + 4 + 130
    assert early.moment == "stage 0, backward of layer 3, microbatch 0"


def test_the_first_stage_holds_one_more_microbatch_in_flight_than_the_next():
    profile = uniform_profile(8, NONE, FULL)
    layout, schedule = Layout.even(8, 4), Schedule(4, 1, 8)
    policy = RecomputePolicy.parse("none", num_layers=8)
    in_flight = [
        stage.peak.breakdown.in_flight_bytes
        for stage in evaluate(profile, layout, schedule, policy).stages
    ]
    assert in_flight == [3 * 200, 2 * 200, 1 * 200, 0]


def test_a_group_at_size_one_costs_what_full_was_measured_at():
    table = CostTable(uniform_profile(4, NONE, FULL))
    costs = table.checkpoints(range(4))
    assert costs.held_bytes[0] == FULL.held_bytes
    assert costs.forward_transient_bytes[0] == FULL.forward_transient_bytes
    assert costs.backward_transient_bytes[0] == FULL.backward_transient_bytes


def test_a_group_reaches_its_members_none_bytes_and_what_full_keeps_besides():
    unit = CostTable(uniform_profile(4, NONE, FULL)).checkpoint((1, 2, 3))
    besides = (4 + 130) - (100 + 30)
    assert unit.held_bytes == 4
    assert unit.held_bytes + unit.backward_transient_bytes == 3 * 100 + 30 + besides
    assert unit.forward_transient_bytes == 20 + 4  # a later member's input is alive too
    assert unit.time_ps == 3 * 40 * 10**9


def test_a_measured_group_wins_over_the_formula():
    measured = ChoiceRecord("full/2", 5, 6, 7, 19.0, 58.0)
    table = CostTable(uniform_profile(4, NONE, FULL, measured))
    unit = table.checkpoint((0, 1))
    assert (unit.held_bytes, unit.backward_transient_bytes) == (5, 7)
    assert unit.time_ps == 77 * 10**9
    assert table.checkpoint((0, 1, 2)).held_bytes == 4


def test_mtp_depths_cannot_be_in_a_group():
    table = CostTable(uniform_profile(2, NONE, FULL, mtp=1))
    assert len(table.checkpoints((0, 1, 2)).held_bytes) == 2
    with pytest.raises(ProfileError, match="layer 2 is an MTP depth"):
        table.checkpoint((1, 2))


def test_time_splits_into_ideal_imbalance_and_recompute():
    head = ChoiceRecord("none", 0, 0, 0, 3.0, 9.0)
    profile = uniform_profile(4, NONE, FULL, head=head)
    policy = RecomputePolicy.parse("full*1,none*3", num_layers=4)
    cost = evaluate(profile, Layout.even(4, 2), Schedule(2, 1, 8), policy)
    first, last = cost.stages
    assert first.ideal_ms == last.ideal_ms == pytest.approx(8 * (4 * 30 + 12) / 2)
    assert first.imbalance_ms == pytest.approx(-8 * 6)
    assert last.imbalance_ms == pytest.approx(8 * 6)
    assert (first.recompute_ms, last.recompute_ms) == (pytest.approx(80), pytest.approx(0))
    assert first.busy_ms == pytest.approx(8 * 70)


def test_the_step_lies_between_all_layers_fast_and_all_layers_slow():
    none, full = replace(NONE, spread_ms=2.0), replace(FULL, spread_ms=3.0)
    policy = RecomputePolicy.parse("full/2*2,none*2", num_layers=4)

    def cost(*choices, shift_ms=0.0):
        moved = (replace(c, backward_ms=c.backward_ms + shift_ms * c.spread_ms) for c in choices)
        profile = uniform_profile(4, *moved)
        return evaluate(profile, Layout.even(4, 2), Schedule(2, 1, 6), policy)

    found = cost(none, full)
    assert found.step_low_ms == pytest.approx(cost(none, full, shift_ms=-1.0).step_ms)
    assert found.step_high_ms == pytest.approx(cost(none, full, shift_ms=1.0).step_ms)
    assert found.step_low_ms < found.step_ms < found.step_high_ms
    assert cost(NONE, FULL).step_high_ms is None


def test_equal_stages_take_the_time_of_narayanan_et_al():
    # (b'/b + p - 1) * (t_f(b) + t_b(b)), b' / b being the number of microbatches.
    profile = uniform_profile(8, NONE)
    for p, m in ((1, 6), (2, 6), (4, 9), (8, 8)):
        policy = RecomputePolicy.parse("none", num_layers=8)
        cost = evaluate(profile, Layout.even(8, p), Schedule(p, 1, m), policy)
        assert cost.step_ms == pytest.approx((m + p - 1) * 30.0 * 8 / p)
        assert cost.bubble_ms == pytest.approx((p - 1) * 30.0 * 8 / p)


def test_uniform_chunks_of_narayanan_et_al_are_a_special_case():
    # Section 3.5: c * A_input + (l / c) * A_intermediate, least at c = sqrt(l * A_int / A_in).
    layers, input_bytes, intermediate = 64, 4, 100
    none = ChoiceRecord("none", intermediate, 0, 0, 1.0, 2.0)
    # full's own transient is such that a checkpoint keeps nothing besides its input.
    full = ChoiceRecord("full", input_bytes, 0, intermediate, 1.0, 3.0)
    profile = uniform_profile(layers, none, full)
    layout, schedule = Layout.even(layers, 1), Schedule(1, 1, 1)
    peaks = {}
    for c in (c for c in range(1, layers + 1) if layers % c == 0):
        text = f"full/{layers // c}" if c < layers else "full"
        peaks[c] = peak_of(profile, layout, schedule, f"{text}*{layers}").bytes
        assert peaks[c] == uniform_chunk_bytes(input_bytes, intermediate, layers, c)
    best = best_uniform_chunks(input_bytes, intermediate, layers)
    assert best == math.sqrt(64 * 100 / 4)
    assert min(peaks, key=peaks.get) == min(peaks, key=lambda c: abs(math.log(c / best)))


def test_a_measured_stage_record_is_used_only_for_its_own_layers():
    profile = uniform_profile(4, NONE, FULL)
    records = tuple(
        StageRecord(
            layers,
            StaticBytes(7),
            overhead=ScheduleOverhead(1, 2),
            residual_bytes=11,
            uncertainty_bytes=5,
        )
        for layers in ((0, 1), (2, 3))
    )
    profile = replace(profile, stages=records)
    measured = stage_base(profile, Layout.even(4, 2), 0, "high")
    assert measured.measured
    assert (measured.static.total_bytes, measured.residual_bytes) == (7, 16)
    assert measured.constant_bytes("backward", 3) == 7 + 16 + 2 + 3 * profile.boundary_bytes
    other = Layout.even(4, 2, num_layers_in_first_pipeline_stage=1)
    assert not stage_base(profile, other, 0).measured


def test_a_layout_without_static_bytes_is_refused_with_the_measured_layout():
    profile = uniform_profile(4, NONE, FULL)
    kinds = tuple(replace(kind, static=None) for kind in profile.kinds)
    with pytest.raises(ProfileError, match="no static bytes of k"):
        stage_base(replace(profile, kinds=kinds), Layout.even(4, 2), 0)


def test_a_policy_or_layout_of_another_model_is_refused():
    profile = uniform_profile(4, NONE, FULL)
    policy = RecomputePolicy.parse("none", num_layers=4)
    with pytest.raises(ProfileError, match="The layout has 6 layers"):
        evaluate(profile, Layout.even(6, 2), Schedule(2, 1, 4), policy)
    with pytest.raises(ProfileError, match="the schedule 4 of 1"):
        evaluate(profile, Layout.even(4, 2), Schedule(4, 1, 4), policy)
    with pytest.raises(PolicyError, match="covers 5 layers"):
        evaluate(
            profile,
            Layout.even(4, 2),
            Schedule(2, 1, 4),
            RecomputePolicy.parse("none", num_layers=5),
        )
    with pytest.raises(ProfileError, match=r"no record of selective\[mlp\] for layer 0"):
        peak_of(profile, Layout.even(4, 2), Schedule(2, 1, 4), "selective[mlp]")
