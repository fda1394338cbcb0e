"""Hand-derived facts and properties of the layout, the schedule replay and its times."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.pipeline import (
    Chunk,
    Event,
    Layout,
    Schedule,
    one_forward_one_backward_ms,
    replay_ms,
)


@st.composite
def schedules(draw, most_chunks=4):
    num_stages = draw(st.integers(1, 6))
    num_chunks = draw(st.integers(1, most_chunks)) if num_stages > 1 else 1
    if num_chunks == 1:
        overlap = num_stages == 1 and draw(st.booleans())
        return Schedule(num_stages, 1, draw(st.integers(1, 20)), None, overlap)
    group = draw(st.integers(num_stages, 12))
    last_group = draw(st.sampled_from([0, *range(num_stages, group)]))
    num_microbatches = group * draw(st.integers(1, 3)) + last_group
    return Schedule(num_stages, num_chunks, num_microbatches, group, draw(st.booleans()))


def times(schedule):
    row = st.lists(st.floats(0, 100), min_size=schedule.num_chunks, max_size=schedule.num_chunks)
    return st.lists(row, min_size=schedule.num_stages, max_size=schedule.num_stages)


def spelled(events):
    return " ".join(f"{event.kind[0].upper()}{event.chunk}.{event.microbatch}" for event in events)


def finish_by_plain_replay(schedule, forward_ms, backward_ms, p2p_ms):
    """The definition, written out: run whatever stage can run until all have run everything."""
    last = schedule.num_stages * schedule.num_chunks - 1
    queues = [list(schedule.events(stage)) for stage in range(schedule.num_stages)]
    free, done, moved = [0.0] * schedule.num_stages, {}, True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, position = queue[0].kind, queue[0].chunk * schedule.num_stages + stage
                neighbour = position - 1 if kind == "forward" else position + 1
                needs = (kind, neighbour, queue[0].microbatch)
                if 0 <= neighbour <= last and needs not in done:
                    break
                event, durations = queue.pop(0), {"forward": forward_ms, "backward": backward_ms}
                start = max(free[stage], done.get(needs, -math.inf) + p2p_ms)
                free[stage] = start + durations[kind][stage][event.chunk]
                done[kind, position, event.microbatch] = free[stage]
                moved = True
    assert not any(queues), "deadlock"
    return free


# The order of events


def test_no_pipelining_alternates_forward_and_backward():
    assert spelled(Schedule(1, 1, 3).events(0)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_ep_overlap_on_one_stage_runs_one_forward_ahead_and_holds_two():
    schedule = Schedule(1, 1, 3, overlap_moe_expert_parallel_comm=True)
    assert spelled(schedule.events(0)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert schedule.in_flight(0).max() + 1 == 2


def test_1f1b_of_three_stages_and_four_microbatches():
    assert [spelled(Schedule(3, 1, 4).events(stage)) for stage in range(3)] == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    ]


def test_fewer_microbatches_than_stages_run_all_forwards_first():
    assert spelled(Schedule(8, 1, 2).events(0)) == "F0.0 F0.1 B0.0 B0.1"
    assert Schedule(8, 1, 2).warmup(0) == 2


def test_interleaved_order_of_two_stages_two_chunks_groups_of_three_with_a_last_group_of_two():
    # Forward order from Megatron's own comment on PP2 N3M5 VP2: 0 1 2 0 1 2 3 4 3 4.
    assert spelled(Schedule(2, 2, 5, 3).events(1)) == (
        "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F0.3 B0.0 F0.4 B0.1 F1.3 B0.2 F1.4 B1.3 "
        "B1.4 B0.3 B0.4"
    )


def test_warmup_follows_the_formula_of_the_interleaved_schedule():
    assert [Schedule(4, 2, 8).warmup(stage) for stage in range(4)] == [10, 8, 6, 4]
    assert [Schedule(4, 3, 12, 6).warmup(stage) for stage in range(4)] == [18, 16, 14, 12]


def test_ep_overlap_warms_up_by_one_more_forward():
    with_overlap = Schedule(4, 2, 8, overlap_moe_expert_parallel_comm=True)
    assert [with_overlap.warmup(stage) for stage in range(4)] == [11, 9, 7, 5]


def test_warmup_never_exceeds_all_microbatches():
    assert Schedule(4, 2, 4).warmup(0) == 8


@given(schedules())
def test_every_forward_and_backward_happens_once_and_backward_follows_its_forward(schedule):
    for stage in range(schedule.num_stages):
        events = schedule.events(stage)
        position = {event: index for index, event in enumerate(events)}
        every = itertools.product(range(schedule.num_chunks), range(schedule.num_microbatches))
        assert len(position) == len(events) == 2 * schedule.num_chunks * schedule.num_microbatches
        for chunk, microbatch in every:
            forward = position[Event("forward", chunk, microbatch)]
            assert forward < position[Event("backward", chunk, microbatch)]


# In flight


def test_1f1b_stage_holds_as_many_microbatches_as_stages_follow_and_itself():
    schedule = Schedule(8, 1, 16)
    held = [int(schedule.in_flight(stage).max()) + 1 for stage in range(8)]
    assert held == [8, 7, 6, 5, 4, 3, 2, 1]


def test_interleaved_four_stages_two_chunks_hold_eleven_alternating_7_4_and_8_3():
    schedule = Schedule(4, 2, 8, 4)
    steady = [
        tuple(count + (chunk == event.chunk) for chunk, count in enumerate(counts))
        for event, counts in zip(schedule.events(0), schedule.in_flight(0).tolist(), strict=True)
        if event.kind == "backward"
    ]
    assert max(map(sum, steady)) == 11
    assert {counts for counts in steady if sum(counts) == 11} == {(7, 4), (8, 3)}


@given(schedules())
def test_in_flight_counts_what_a_plain_tally_counts(schedule):
    for stage in range(schedule.num_stages):
        tally = [0] * schedule.num_chunks
        events = schedule.events(stage)
        for event, counted in zip(events, schedule.in_flight(stage).tolist(), strict=True):
            tally[event.chunk] -= event.kind == "backward"
            assert counted == tally
            tally[event.chunk] += event.kind == "forward"
        assert tally == [0] * schedule.num_chunks


@given(schedules())
def test_first_stage_holds_most_microbatches(schedule):
    held = [schedule.in_flight(stage).sum(axis=1).max() for stage in range(schedule.num_stages)]
    assert held == sorted(held, reverse=True)


@given(schedules())
def test_no_stage_holds_more_than_warmup_and_one(schedule):
    for stage in range(schedule.num_stages):
        total = schedule.num_microbatches * schedule.num_chunks
        held = schedule.in_flight(stage).sum(axis=1).max() + 1
        assert held == min(schedule.warmup(stage) + 1, total)


@given(schedules())
def test_distinct_moments_are_the_set_of_all_moments(schedule):
    for stage in range(schedule.num_stages):
        events, in_flight = schedule.events(stage), schedule.in_flight(stage).tolist()
        every = {
            (event.kind, event.chunk, tuple(counts))
            for event, counts in zip(events, in_flight, strict=True)
        }
        moments = schedule.distinct_moments(stage)
        assert {(moment.kind, moment.chunk, moment.in_flight) for moment in moments} == every
        assert len(moments) == len(every)
        for moment in moments:
            example = events[moment.event]
            assert (example.kind, example.chunk) == (moment.kind, moment.chunk)
            assert tuple(in_flight[moment.event]) == moment.in_flight


@given(schedules(), st.data())
def test_weighing_the_binding_moments_finds_the_highest_peak(schedule, data):
    held = data.draw(
        st.lists(st.integers(0, 9), min_size=schedule.num_chunks, max_size=schedule.num_chunks)
    )

    def peaks(moments):
        best = {}
        for moment in moments:
            weight = sum(n * size for n, size in zip(moment.in_flight, held, strict=True))
            key = (moment.kind, moment.chunk)
            best[key] = max(best.get(key, 0), weight)
        return best

    for stage in range(schedule.num_stages):
        binding, distinct = schedule.binding_moments(stage), schedule.distinct_moments(stage)
        assert set(binding) <= set(distinct)
        assert peaks(binding) == peaks(distinct)


def test_1f1b_has_one_binding_moment_of_each_kind():
    schedule = Schedule(8, 1, 1024)
    found = [(moment.kind, moment.in_flight) for moment in schedule.binding_moments(2)]
    assert found == [("forward", (5,)), ("backward", (5,))]


# Time


@settings(max_examples=200)
@given(schedules(), st.data())
def test_replay_equals_the_definition_written_out(schedule, data):
    forward, backward = data.draw(times(schedule)), data.draw(times(schedule))
    p2p_ms = data.draw(st.sampled_from([0.0, 0.5, 30.0]))
    replayed = replay_ms(schedule, forward, backward, p2p_ms)
    expected = finish_by_plain_replay(schedule, forward, backward, p2p_ms)
    assert replayed.finish_ms == pytest.approx(expected)
    assert replayed.total_ms == pytest.approx(max(expected))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 1), (4, 3), (4, 16), (64, 128)])
def test_equal_stages_take_m_plus_p_minus_1_slots(p, m):
    replayed = replay_ms(Schedule(p, 1, m), [[1.25]] * p, [[2.5]] * p)
    assert replayed.total_ms == (m + p - 1) * 3.75
    assert replayed.busy_ms == (m * 3.75,) * p
    assert replayed.idle_ms == ((p - 1) * 3.75,) * p


def test_micro_batch_form_of_narayanan_et_al_is_the_replay_of_equal_stages():
    # (b'/b + p - 1) * (t_f(b) + t_b(b)) with b' = B/d = 64 samples per pipeline.
    for b, forward, backward in [(1, 1.0, 2.0), (2, 1.5, 3.0), (8, 5.0, 10.0)]:
        replayed = replay_ms(Schedule(8, 1, 64 // b), [[forward]] * 8, [[backward]] * 8)
        assert replayed.total_ms == (64 / b + 8 - 1) * (forward + backward)


@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 2), (2, 3, 8), (4, 2, 16), (8, 4, 8), (16, 8, 64)]
)
def test_interleaved_bubble_is_p_minus_1_over_v_times_m(p, v, m):
    replayed = replay_ms(Schedule(p, v, m), [[1.0] * v] * p, [[2.0] * v] * p)
    ideal = 3.0 * v * m
    assert replayed.total_ms == pytest.approx(ideal * (1 + (p - 1) / (v * m)))


@given(schedules(most_chunks=1), st.data())
def test_formula_is_exact_for_1f1b_when_the_last_stage_is_slowest(schedule, data):
    if schedule.overlap_moe_expert_parallel_comm:
        return
    forward, backward = data.draw(times(schedule)), data.draw(times(schedule))
    forward[-1], backward[-1] = max(forward), max(backward)
    stage_ms = [f[0] + b[0] for f, b in zip(forward, backward, strict=True)]
    formula = one_forward_one_backward_ms(stage_ms, schedule.num_microbatches)
    assert replay_ms(schedule, forward, backward).total_ms == pytest.approx(formula)


@given(schedules(most_chunks=1), st.data())
def test_formula_is_a_bound_for_1f1b_when_backwards_are_proportional_to_forwards(schedule, data):
    forward = data.draw(times(schedule))
    backward = [[2 * ms for ms in row] for row in forward]
    stage_ms = [3 * row[0] for row in forward]
    formula = one_forward_one_backward_ms(stage_ms, schedule.num_microbatches)
    slowest_stage = max(stage_ms) * schedule.num_microbatches
    total_ms = replay_ms(schedule, forward, backward).total_ms
    assert slowest_stage * (1 - 1e-9) <= total_ms <= formula * (1 + 1e-9)


def test_message_time_delays_each_hop():
    # Four virtual stages: 3 hops forward and 3 back. The second microbatch trails the first by one
    # forward and one backward.
    one_microbatch = replay_ms(Schedule(4, 1, 1), [[1.0]] * 4, [[1.0]] * 4, p2p_ms=10.0)
    two_microbatches = replay_ms(Schedule(2, 2, 2), [[1.0] * 2] * 2, [[1.0] * 2] * 2, p2p_ms=10.0)
    assert one_microbatch.total_ms == 8 + 6 * 10
    assert two_microbatches.total_ms == 8 + 2 + 6 * 10


# Layout


def test_even_layout_deals_chunks_round_the_stages():
    layout = Layout.even(8, 2, 2)
    assert layout.stages == (
        (Chunk((0, 1), embedding=True), Chunk((4, 5))),
        (Chunk((2, 3)), Chunk((6, 7), head=True)),
    )
    assert layout.chunk_layers() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (layout.num_stages, layout.num_chunks, layout.num_layers) == (2, 2, 8)


def test_one_stage_holds_everything():
    assert Layout.even(3, 1).stages == ((Chunk((0, 1, 2), embedding=True, head=True),),)


def test_accounting_for_embedding_and_loss_takes_a_layer_from_the_ends():
    # 126 layers with both on 16 stages of 8 chunks, as Llama 3.1 405B is trained.
    layout = Layout.even(
        126,
        16,
        8,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert [len(chunk.layers) for chunk in layout.stages[0]] == [0] + [1] * 7
    assert [len(chunk.layers) for chunk in layout.stages[15]] == [1] * 7 + [0]
    assert layout.stages[0][0].embedding
    assert layout.stages[15][7].head
    assert layout.stages[1][0].layers == (0,)


def test_first_and_last_stage_may_have_their_own_number_of_layers():
    layout = Layout.even(
        61, 8, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=9
    )
    assert [len(chunk.layers) for (chunk,) in layout.stages] == [4] + [8] * 6 + [9]


def test_mtp_depths_follow_the_last_layer_on_the_last_chunk():
    layout = Layout.even(8, 2, 2, mtp_num_layers=2)
    assert layout.stages[1][1] == Chunk((6, 7, 8, 9), head=True)
    assert (layout.num_layers, layout.mtp_num_layers) == (8, 2)


def test_layout_text_is_unrolled_and_dealt_round_the_stages():
    layout = Layout.parse("Et*3|(tt|)*6mL", 4, 2)
    assert layout.stages[0] == (Chunk((0, 1, 2), embedding=True), Chunk((9, 10)))
    assert layout.stages[3] == (Chunk((7, 8)), Chunk((15,), head=True))
    assert (layout.num_layers, layout.mtp_num_layers) == (15, 1)


def test_layout_text_may_leave_stages_empty_and_mtp_in_a_chunk_of_its_own():
    layout = Layout.parse("E||t*4,|t*4|m|L", 6)
    assert layout.chunk_layers() == ((), (), (0, 1, 2, 3), (4, 5, 6, 7), (8,), ())
    assert [chunk.head for (chunk,) in layout.stages] == [False] * 5 + [True]


def test_layout_list_reads_like_the_text():
    rows = [["embedding", "decoder"], ["Decoder"], [" decoder "], ["decoder", "mtp", "loss"]]
    listed = Layout.even(4, 2, mtp_num_layers=1, pipeline_model_parallel_layout=rows)
    assert listed == Layout.parse("Et|t|t|tmL", 2, 2)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_every_layer_stands_exactly_once(p, v, per_chunk, mtp):
    v = v if p > 1 else 1
    layout = Layout.even(p * v * per_chunk, p, v, mtp_num_layers=mtp)
    assert sorted(sum(layout.chunk_layers(), ())) == list(range(p * v * per_chunk + mtp))


# Refusals

even = Layout.even
parse = Layout.parse
REFUSED = [
    (lambda: even(0, 1), "num_layers is 0; it must be at least 1"),
    (lambda: even(8, 0), "pp is 0"),
    (lambda: even(8, 2, 0), "vp is 0"),
    (lambda: even(8, 2, mtp_num_layers=-1), "mtp_num_layers is -1"),
    (lambda: even(10, 4), "10 layers cannot be divided evenly among 4 stages"),
    (lambda: even(8, 4, 4), "2 layers of a stage cannot be divided evenly among 4 chunks"),
    (lambda: even(8, 1, 2), "2 chunks on a single stage"),
    (lambda: even(7, 4, num_layers_in_first_pipeline_stage=2), "5 middle layers cannot be"),
    (lambda: even(8, 4, num_layers_in_first_pipeline_stage=0), "pipeline_stage is 0"),
    (lambda: even(8, 4, num_layers_in_last_pipeline_stage=8), "0 of 8 layers are left for 3 of 4"),
    (lambda: even(8, 4, num_layers_in_last_pipeline_stage=11), "-3 of 8 layers are left"),
    (
        lambda: even(
            8, 1, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=4
        ),
        "for -1 of 1 stages",
    ),
    (
        lambda: even(
            7,
            2,
            num_layers_in_first_pipeline_stage=3,
            account_for_loss_in_pipeline_split=True,
        ),
        "keep one",
    ),
    (
        lambda: even(
            1,
            1,
            account_for_loss_in_pipeline_split=True,
            pipeline_model_parallel_layout="EtL",
        ),
        "keep one",
    ),
    (lambda: even(2, 2, pipeline_model_parallel_layout="Et|tL", vp=2), "do not make 2 stages of 2"),
    (lambda: even(3, 2, pipeline_model_parallel_layout="Et|tL"), "has 2 layers and 0 MTP depths"),
    (
        lambda: even(2, 2, mtp_num_layers=1, pipeline_model_parallel_layout="Et|tL"),
        "the model has 2 and 1",
    ),
    (
        lambda: even(1, 1, pipeline_model_parallel_layout=[["embedding", "layer"]]),
        "Unknown layer 'layer'",
    ),
    (lambda: parse("Et|t|tL", 2), "has 3 chunks, which do not make 2 stages"),
    (lambda: parse("EtxL", 1), "has 'x' where only"),
    (lambda: parse("E(t|tL", 2), "has '\\(' where only"),
    (lambda: parse("Et*9999999L", 1), "more than 10000 symbols"),
    (
        lambda: even(
            8, 2, 2, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=4
        ),
        "divides by the number of stages between them",
    ),
    (lambda: parse("E|L", 2), "at least one"),
    (lambda: parse("Et|t", 2), "one L last"),
    (lambda: parse("tE|tL", 2), "one E first"),
    (lambda: parse("Et|EtL", 2), "one E first"),
    (lambda: parse("Em|tL", 2), "then m"),
    (lambda: parse("Et|mt|tL", 3), "then m"),
    (lambda: parse("Et|tm|mL", 3), "all MTP depths \\(m\\) in one chunk"),
    (lambda: parse("Et|tm|L|", 2), "last chunk of its stage"),
    (lambda: parse("Et|t|t|L", 1), "4 chunks on a single stage"),
    (lambda: Layout(()), "at least one stage"),
    (lambda: Layout(((Chunk((0,)),), (Chunk((1,)), Chunk((2,))))), "same number of chunks"),
    (lambda: Layout(((Chunk((1,)),), (Chunk((0,)),))), "in model order"),
    (lambda: Schedule(0, 1, 1), "num_stages is 0"),
    (lambda: Schedule(1, 1, 0), "num_microbatches is 0"),
    (lambda: Schedule(1, 2, 4), "2 chunks on a single stage"),
    (lambda: Schedule(4, 2, 8, 3), "group size is 3; interleaved, it must lie between"),
    (lambda: Schedule(4, 2, 8, 9), "group size is 9"),
    (lambda: Schedule(4, 2, 3), "group size is 4"),
    (lambda: Schedule(4, 2, 10), "leave a last group of 2, fewer than the 4 stages"),
    (lambda: Schedule(4, 1, 8, None, True), "on 4 stages needs interleaving"),
    (lambda: Schedule(4, 1, 8).events(4), "Stage 4 does not exist: stages are 0 to 3"),
    (lambda: replay_ms(Schedule(2, 1, 2), [[1.0]], [[1.0]] * 2), "forward_ms must have 2 stages"),
    (lambda: replay_ms(Schedule(1, 1, 2), [[1.0]], [[-1.0]]), "backward_ms must be finite"),
    (lambda: replay_ms(Schedule(1, 1, 2), [[math.nan]], [[1.0]]), "forward_ms must be finite"),
    (lambda: replay_ms(Schedule(1, 1, 2), [[1.0]], [[1.0]], -1.0), "p2p_ms is -1.0"),
    (lambda: one_forward_one_backward_ms([], 1), "num_stages is 0"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_megatron_refuses_is_refused_and_said(ask, message):
    with pytest.raises(PipelineError, match=message):
        ask()
