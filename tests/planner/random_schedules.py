"""Schedules that Megatron runs, and times for them."""

from hypothesis import strategies as st

from megatron_autorecompute.planner.cost.schedule import Schedule


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
    """Milliseconds, `[stage][chunk]`, in whole picoseconds."""
    ms = st.integers(0, 10**11).map(lambda ps: ps / 10**9)
    row = st.lists(ms, min_size=schedule.num_chunks, max_size=schedule.num_chunks)
    return st.lists(row, min_size=schedule.num_stages, max_size=schedule.num_stages)
