"""Hand-derived facts and properties of the order of events."""

import itertools

import pytest
from hypothesis import given

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.schedule import Event, Schedule
from tests.planner.definitions import order
from tests.planner.moments import in_flight
from tests.planner.random_schedules import schedules


def spelled(events):
    return " ".join(
        f"{event.direction[0].upper()}{event.chunk}.{event.microbatch}" for event in events
    )


def test_no_pipelining_alternates_forward_and_backward():
    assert spelled(Schedule(1, 1, 3).events(0)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_ep_overlap_on_one_stage_runs_one_forward_ahead_and_holds_two():
    schedule = Schedule(1, 1, 3, overlap_moe_expert_parallel_comm=True)
    assert spelled(schedule.events(0)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert in_flight(schedule, 0)[3] == [1]  # beside a backward


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
def test_every_order_is_that_of_the_definitions(schedule):
    for stage in range(schedule.num_stages):
        events = schedule.events(stage)
        found = tuple((event.direction, event.chunk, event.microbatch) for event in events)
        assert found == order(schedule, stage)


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


def test_1f1b_stage_holds_as_many_microbatches_as_stages_follow_and_itself():
    schedule = Schedule(8, 1, 16)
    held = [max(map(max, in_flight(schedule, stage))) + 1 for stage in range(8)]
    assert held == [8, 7, 6, 5, 4, 3, 2, 1]


def test_interleaved_four_stages_two_chunks_hold_eleven_alternating_7_4_and_8_3():
    schedule = Schedule(4, 2, 8, 4)
    steady = [
        tuple(count + (chunk == event.chunk) for chunk, count in enumerate(counts))
        for event, counts in zip(schedule.events(0), in_flight(schedule, 0), strict=True)
        if event.direction == "backward"
    ]
    assert max(map(sum, steady)) == 11
    assert {counts for counts in steady if sum(counts) == 11} == {(7, 4), (8, 3)}


@given(schedules())
def test_first_stage_holds_most_microbatches(schedule):
    held = [max(map(sum, in_flight(schedule, stage))) for stage in range(schedule.num_stages)]
    assert held == sorted(held, reverse=True)


@given(schedules())
def test_no_stage_holds_more_than_warmup_and_one(schedule):
    for stage in range(schedule.num_stages):
        total = schedule.num_microbatches * schedule.num_chunks
        held = max(map(sum, in_flight(schedule, stage))) + 1
        assert held == min(schedule.warmup(stage) + 1, total)


REFUSED = [
    (lambda: Schedule(0, 1, 1), "num_stages is 0"),
    (lambda: Schedule(1, 1, 0), "num_microbatches is 0"),
    (lambda: Schedule(1, 2, 4), "2 chunks on a single stage"),
    (lambda: Schedule(4, 2, 8, 3), "group size is 3; interleaved, it must lie between"),
    (lambda: Schedule(4, 2, 8, 9), "group size is 9"),
    (lambda: Schedule(4, 2, 3), "group size is 4"),
    (lambda: Schedule(4, 2, 10), "leave a last group of 2, fewer than the 4 stages"),
    (lambda: Schedule(4, 1, 8, None, True), "on 4 stages needs interleaving"),
    (lambda: Schedule(4, 1, 8).events(4), "Stage 4 does not exist: stages are 0 to 3"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_megatron_refuses_is_refused_and_said(ask, message):
    with pytest.raises(PipelineError, match=message):
        ask()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Schedule(2, 1, 10**20), "at most 1099511627776 are planned"),
        (lambda: Schedule(2, 2, 10**9, 10**8), "put 200000000 in flight; at most 2048 are planned"),
    ],
)
def test_a_step_beyond_every_machine_is_refused_before_it_is_listed(ask, message):
    with pytest.raises(PipelineError, match=message):
        ask()
