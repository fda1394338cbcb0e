"""Formulas of Narayanan et al. against the replays they are special cases of."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import replay_ms
from megatron_autorecompute.profile import (
    ChoiceRecord,
)
from tests.planner.formulas import (
    best_uniform_chunks,
    micro_batch_step_ms,
    one_forward_one_backward_ms,
    uniform_chunk_bytes,
)
from tests.planner.random_schedules import schedules, times
from tests.planner.uniform_profiles import peak_of, uniform_profile


def test_micro_batch_form_of_narayanan_et_al_is_the_replay_of_equal_stages():
    # (b'/b + p - 1) * (t_f(b) + t_b(b)) with b' = B/d = 64 samples per pipeline.
    for b, forward, backward in [(1, 1.0, 2.0), (2, 1.5, 3.0), (8, 5.0, 10.0)]:
        replayed_ms = replay_ms(Schedule(8, 1, 64 // b), [[forward]] * 8, [[backward]] * 8)
        assert replayed_ms == micro_batch_step_ms(64, b, 8, forward, backward)


@given(schedules(most_chunks=1), st.data())
def test_formula_is_exact_for_1f1b_when_the_last_stage_is_slowest(schedule, data):
    if schedule.overlap_moe_expert_parallel_comm:
        return
    forward, backward = data.draw(times(schedule)), data.draw(times(schedule))
    forward[-1], backward[-1] = max(forward), max(backward)
    stage_ms = [f[0] + b[0] for f, b in zip(forward, backward, strict=True)]
    formula = one_forward_one_backward_ms(stage_ms, schedule.num_microbatches)
    assert replay_ms(schedule, forward, backward) == pytest.approx(formula)


@given(schedules(most_chunks=1), st.data())
def test_formula_is_a_bound_for_1f1b_when_backwards_are_proportional_to_forwards(schedule, data):
    forward = data.draw(times(schedule))
    backward = [[2 * ms for ms in row] for row in forward]
    stage_ms = [3 * row[0] for row in forward]
    formula = one_forward_one_backward_ms(stage_ms, schedule.num_microbatches)
    slowest_stage = max(stage_ms) * schedule.num_microbatches
    total_ms = replay_ms(schedule, forward, backward)
    assert slowest_stage * (1 - 1e-9) <= total_ms <= formula * (1 + 1e-9)


def test_uniform_chunks_of_narayanan_et_al_are_a_special_case():
    # Section 3.5: c * A_input + (l / c) * A_intermediate, least at c = sqrt(l * A_int / A_in).
    layers, input_bytes, intermediate = 64, 4, 100
    none = ChoiceRecord("none", intermediate, 0, 0, 1.0, 2.0)
    # full's own transient is such that a checkpoint keeps nothing besides its input.
    full = ChoiceRecord("full", input_bytes, 0, intermediate, 1.0, 3.0)
    profile = uniform_profile(layers, none, full)
    layout, schedule = Layout.from_flags(layers, 1), Schedule(1, 1, 1)
    peaks = {}
    for c in (c for c in range(1, layers + 1) if layers % c == 0):
        text = f"full/{layers // c}" if c < layers else "full"
        peaks[c] = peak_of(profile, layout, schedule, f"{text}*{layers}").bytes
        assert peaks[c] == uniform_chunk_bytes(input_bytes, intermediate, layers, c)
    best = best_uniform_chunks(input_bytes, intermediate, layers)
    assert best == math.sqrt(64 * 100 / 4)
    assert min(peaks, key=peaks.get) == min(peaks, key=lambda c: abs(math.log(c / best)))


def test_the_formula_of_1f1b_needs_a_stage():
    with pytest.raises(PipelineError, match="num_stages is 0"):
        one_forward_one_backward_ms([], 1)
