from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.planner.cost.p2p_tensors import (
    decisive_moments,
    every_moment,
    extra_owners,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.profile import Deferred
from tests.planner.moments import in_flight
from tests.planner.random_schedules import schedules


@settings(max_examples=60)
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

        def total(kind, chunk, counts, extra):
            waiting = sum(n * size for n, size in zip(counts, sizes, strict=False))
            return waiting + sizes[4 + chunk] * (1 if kind == "forward" else 2) + extra * sizes[0]

        rows = zip(
            schedule.events(stage),
            in_flight(schedule, stage),
            map(len, extra_owners(schedule, stage)),
            strict=True,
        )
        assert max(
            total(moment.direction, moment.chunk, moment.in_flight, moment.extra)
            for moment in decisive_moments(schedule, stage)
        ) == max(total(e.direction, e.chunk, waiting, extra) for e, waiting, extra in rows)


@settings(max_examples=60)
@given(
    schedules(),
    st.integers(0, 12),
    st.builds(Deferred, st.just(1), st.integers(1, 2), st.none() | st.integers(1, 60)),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_the_fullest_moment_with_deferred_gradients_is_that_of_all_events(
    schedule, groups, deferred, sizes
):
    many = schedule.num_microbatches + groups * schedule.group_size
    schedule = replace(schedule, num_microbatches=many, overlap_moe_expert_parallel_comm=False)
    stage, own = schedule.num_stages - 1, sizes[6]

    def total(moment):
        waiting = sum(n * size for n, size in zip(moment.in_flight, sizes, strict=False))
        run = sizes[4 + (moment.direction == "backward")] * (1 + moment.chunk)
        # Of a run that waits the tensor received and its gradient are two.
        return waiting + run + own * moment.extra + (2 * own + sizes[7]) * moment.deferred

    decisive, every = (
        f(schedule, stage, deferred=deferred) for f in (decisive_moments, every_moment)
    )
    assert max(map(total, decisive)) == max(map(total, every))
    runs = deferred.runs * many
    last = runs - deferred.runs if every[-1].chunk == schedule.num_chunks - 1 else runs
    assert every[-1].deferred == min(last, deferred.limit or last)
    plain = every_moment(schedule, stage)
    assert all(0 <= p.extra - m.extra <= p.extra for p, m in zip(plain, every, strict=True))


@settings(max_examples=40)
@given(schedules(), st.integers(0, 12), st.booleans(), st.booleans())
def test_many_microbatches_have_the_loads_of_a_plain_count_of_all_events(
    schedule, groups, overlap_p2p, deallocated
):
    many = schedule.num_microbatches + groups * schedule.group_size
    schedule = replace(
        schedule, num_microbatches=many, overlap_moe_expert_parallel_comm=False
    )  # events side by side: test_beside
    for stage in range(schedule.num_stages):
        settings = {"overlap_p2p": overlap_p2p, "deallocated": deallocated}
        extra = map(len, extra_owners(schedule, stage, **settings))
        events = schedule.events(stage)
        first = {}
        waiting = map(tuple, in_flight(schedule, stage))
        for event, counts, count in zip(events, waiting, extra, strict=True):
            first.setdefault((event.direction, event.chunk, counts, count), event.microbatch)
        found = decisive_moments(schedule, stage, **settings)
        for moment in found:
            key = (moment.direction, moment.chunk, moment.in_flight, moment.extra)
            assert first[key] == moment.microbatch
        # None of those left out exceeds all that are kept, chunk by chunk.
        for direction, chunk, counts, count in first:
            total = sum(counts) + count
            kept = [x for x in found if (x.direction, x.chunk) == (direction, chunk)]
            assert any(sum(x.in_flight) + x.extra >= total for x in kept)


def test_the_number_of_microbatches_adds_no_work_to_the_loads():
    for p, v in ((4, 1), (4, 3)):
        moments = [decisive_moments(Schedule(p, v, m), 0) for m in (40, 4 * 10**8)]
        plain = [[(x.direction, x.chunk, x.in_flight, x.extra) for x in each] for each in moments]
        assert plain[0] == plain[1]


@settings(max_examples=40)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 3))
def test_a_chunk_is_idle_from_its_last_backward_to_its_next_forward(p, v, groups):
    schedule = Schedule(p, v, p * groups, overlap_moe_expert_parallel_comm=True)
    for stage in range(p):
        alive, ran = [0] * v, [False] * v
        moments = every_moment(schedule, stage)
        for at, moment in enumerate(moments):
            if moment.direction == "forward":
                pair = moments[at + 1] if moment.beside is not None else None
                back = moment.beside
                idle = [ran[c] and not alive[c] and c != back for c in range(v)]
                assert moment.idle == tuple(map(int, idle))
                assert pair is None or (pair.idle, pair.idle_apart, pair.late, pair.extra) == (
                    (moment.idle, moment.idle_apart, moment.late, moment.extra)
                )
                alive[moment.chunk] += 1
            else:
                alive[moment.chunk] -= 1
                ran[moment.chunk] = True
            assert all(a <= 2 * i for a, i in zip(moment.idle_apart, moment.idle, strict=True))
