"""Every moment of a stage, for tests that look for the highest or draw them all."""

from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.peak_memory import (
    StageBytes,
    check_layout,
    every_moment,
    stage_base,
)
from megatron_autorecompute.planner.cost.unit_costs import CostTable


def timeline(profile, layout, schedule, policy, stage):
    """Name and bytes of every moment of one stage's step, in order.

    A forward passes the units from first to last, a backward from last to first.
    """
    check_layout(profile, layout, schedule)
    table, base = CostTable(profile), stage_base(profile, layout, stage)
    columns = [ChunkColumns(c, table.chunk_units(c, policy)) for c in layout.stages[stage]]
    moments, own = [], StageBytes(base, columns)
    for moment, event in zip(
        every_moment(profile, schedule, stage), schedule.events(stage), strict=True
    ):
        order = range(len(columns[event.chunk].units))
        for unit in order if event.direction == "forward" else reversed(order):
            name = f"{event.direction} of {columns[event.chunk].units[unit].name}"
            running = own.running(moment)
            points = [n for n, at in enumerate(running.points) if at == (event.direction, unit)]
            split = own.breakdown(moment, max(points, key=running.bytes.__getitem__))
            moments.append((f"{name}, microbatch {event.microbatch}", split))
    return moments


def in_flight(schedule, stage):
    """The microbatches of each chunk in flight at each event, its own not counted; those of events
    beside it are."""
    tally, found = [0] * schedule.num_chunks, []
    for event in schedule.events(stage):
        tally[event.chunk] -= event.direction == "backward"
        found.append(list(tally))
        tally[event.chunk] += event.direction == "forward"
    return found
