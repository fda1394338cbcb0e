"""One step of a plan as Chrome trace events, which Perfetto and chrome://tracing open.

A stage is a process with three threads: compute, p2p and recompute, and where activations are
offloaded with two of copies, to host memory and back; its memory is a counter.
Times of trace events are in microseconds, to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

from megatron_autorecompute.planner.cost.copies import PS_PER_NS
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.timeline import StageTimeline, timeline
from megatron_autorecompute.units import GIB

COMPUTE, P2P, RECOMPUTE, TO_HOST, TO_DEVICE = range(5)
"""Threads of a stage; the last two where something is copied."""
_THREADS = ("compute", "p2p", "recompute", "copies to host", "copies to device")

TraceEvent = dict[str, Any]
Place = tuple[bool, int, int]
"""Whether it is a backward, the position of the chunk in the model, and the microbatch."""


def trace_json(plan: Plan) -> str:
    """The trace as JSON. Raises: ProfileError if the plan's profile lacks a record."""
    return json.dumps(trace(plan), separators=(",", ":"))


def trace(plan: Plan) -> dict[str, Any]:
    """The trace: its events, and in `otherData` what the plan says and a job measured."""
    stages = timeline(plan).stages
    ends: dict[Place, int] = {}
    for one in stages:
        columns = one.backward, one.chunk * len(stages) + one.stage, one.microbatch
        places = zip(*(column.tolist() for column in columns), strict=True)
        ends |= zip(places, map(_ns, one.end_ms.tolist()), strict=True)
    events = chain.from_iterable(_stage(plan, stage, ends) for stage in stages)
    measured = plan.profile.measured_step
    about = {
        "model": plan.profile.model.name,
        "recompute_policy": plan.policy.format(),
        "times": "from the plan: messages take no time, the optimizer step is not modelled",
        "measured_step": None if measured is None else asdict(measured),
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(events)}


def _stage(plan: Plan, stage: StageTimeline, ends: dict[Place, int]) -> Iterator[TraceEvent]:
    yield _about(stage, "process_name", f"stage {stage.stage}")
    for thread, name in enumerate(_THREADS[: TO_HOST if stage.copies is None else None]):
        yield {**_about(stage, "thread_name", name), "tid": thread}
    yield from _messages(stage, ends, plan.layout.num_stages, plan.profile.boundary_bytes)
    for copy in () if stage.copies is None else stage.copies.copied:
        thread = TO_HOST if copy.to_host else TO_DEVICE
        args = {"chunk": copy.chunk, "microbatch": copy.microbatch}
        args["bytes"] = copy.group.record.host_bytes
        span = round(copy.begin_ps / PS_PER_NS), round(copy.end_ps / PS_PER_NS)
        yield _slice(stage.stage, thread, copy.name, *span, args)
    yield _counter(stage.stage, "memory GiB", 0, {"alive": stage.static_bytes})
    for event in range(len(stage.chunk)):
        yield from _running(plan, stage, event)
    alive = {"alive": stage.static_bytes + stage.optimizer_step_peak_bytes}
    yield _counter(stage.stage, "memory GiB", _ns(stage.end_ms[-1]) + 1, alive)


def _about(stage: StageTimeline, what: str, name: str) -> TraceEvent:
    return {"ph": "M", "pid": stage.stage, "name": what, "args": {"name": name}}


def _running(plan: Plan, stage: StageTimeline, event: int) -> Iterator[TraceEvent]:
    """An event with the most bytes alive in it, its units, and on the thread of recompute what of
    them is done again."""
    backward, chunk = bool(stage.backward[event]), int(stage.chunk[event])
    microbatch = int(stage.microbatch[event])
    start, end = _ns(stage.start_ms[event]), _ns(stage.end_ms[event])
    name = f"{_direction(backward)} microbatch {microbatch}"
    args = {"chunk": chunk, "microbatch": microbatch}
    if early := _ns(stage.ahead_ms[event]):
        first = _ns(stage.end_ms[event - 1])
        for thread in (COMPUTE, RECOMPUTE):
            of = f"recompute early for {name}"
            yield _slice(stage.stage, thread, of, first, min(first + early, start), args)
    yield _slice(stage.stage, COMPUTE, name, start, end, args)
    yield from _memory(stage, start, event)
    for number, first, again, last in _spans(stage, event):
        unit = stage.units[chunk][number]
        choice = plan.recompute_policy[unit.layers[0]] if unit.layers else "none"
        about = {**args, "choice": choice}
        yield _slice(stage.stage, COMPUTE, unit.name, first, last, about)
        if again is not None:
            yield _slice(stage.stage, RECOMPUTE, f"recompute {unit.name}", first, again, about)
    for first, last in _waits(stage, event):
        yield _slice(stage.stage, COMPUTE, "wait for copy", first, last, args)
    if event + 1 < len(stage.chunk) and _ns(stage.start_ms[event + 1]) > end:
        yield from _memory(stage, end, event + 1, waits=True)


def _memory(
    stage: StageTimeline, at: int, event: int, *, waits: bool = False
) -> Iterator[TraceEvent]:
    """Counters of the most bytes in an event, or while the stage waits for it: all of them, and
    activations by what they are."""
    parts = {
        "in flight": int(stage.in_flight_bytes[event]),
        "embedding, head": int(stage.outside_bytes[event]),
        "between stages": int(stage.overhead_bytes[event]),
    }
    others = stage.static_bytes + sum(parts.values())
    parts["running chunk"] = 0 if waits else int(stage.peak_bytes[event]) - others
    yield _counter(stage.stage, "memory GiB", at, {"alive": others + parts["running chunk"]})
    yield _counter(stage.stage, "activations GiB", at, parts)


def _spans(stage: StageTimeline, event: int) -> Iterator[tuple[int, int, int | None, int]]:
    """The number of each unit of an event in the order they run, a backward beginning with the
    last; when it begins, until when its backward recomputes (None: not at all), and when it
    ends."""
    backward, chunk = bool(stage.backward[event]), stage.chunk[event]
    start, end = _ns(stage.start_ms[event]), _ns(stage.end_ms[event])
    units = stage.units[chunk]
    times = [u.backward_ps - u.ahead_ps if backward else u.forward_ps for u in units]
    scale = 1 / PS_PER_NS
    if stage.copies is None and any(times):  # residual time is spread; with copies it is the rest
        scale = (end - start) / sum(times)

    def when(done_ps: int) -> int:
        waited = sum(wait for at, wait in _waits_ps(stage, event) if at < done_ps) / PS_PER_NS
        return min(end, start + round(done_ps * scale + waited))

    done = 0
    for number in range(len(units))[:: -1 if backward else 1]:
        time, recompute = times[number], stage.recompute_ps[chunk][number]
        again = when(done + min(time, recompute)) if backward and recompute > 0 else None
        yield number, when(done), again, when(done + time)
        done += time


def _waits(stage: StageTimeline, event: int) -> Iterator[tuple[int, int]]:
    """The times in which an event waits for copies."""
    waited, start = 0, _ns(stage.start_ms[event])
    for at, wait in _waits_ps(stage, event):
        first, last = ((at + waited + more) / PS_PER_NS for more in (0, wait))
        yield start + round(first), start + round(last)
        waited += wait


def _waits_ps(stage: StageTimeline, event: int) -> tuple[tuple[int, int], ...]:
    return () if stage.copies is None else stage.copies.ran[event].waits


def _messages(
    stage: StageTimeline, ends: dict[Place, int], num_stages: int, boundary_bytes: int
) -> Iterator[TraceEvent]:
    """Tensors that arrive from other stages, and how long the stage waits for one."""
    free = 0
    columns = stage.backward, stage.chunk, stage.microbatch, stage.start_ms, stage.end_ms
    for backward, chunk, microbatch, start_ms, end_ms, ahead_ms in zip(
        *(column.tolist() for column in (*columns, stage.ahead_ms)), strict=True
    ):
        start, free = _ns(start_ms), free + _ns(ahead_ms)
        before = chunk * num_stages + stage.stage + (1 if backward else -1)
        arrived = ends.get((backward, before, microbatch))
        if arrived is not None and num_stages > 1:
            sender = before % num_stages
            name = f"{_direction(backward)} microbatch {microbatch} from stage {sender}"
            args = {"chunk": chunk, "microbatch": microbatch, "bytes": boundary_bytes}
            there = min(max(free, arrived), start)
            if there > free:
                yield _slice(stage.stage, P2P, f"wait for {name}", free, there, args)
            at = {"ph": "i", "s": "t", "pid": stage.stage, "tid": P2P, "ts": arrived / 1000}
            yield {**at, "name": f"receive {name}", "args": args}
        free = _ns(end_ms)


def _direction(backward: bool) -> str:
    return "backward" if backward else "forward"


def _slice(
    stage: int, thread: int, name: str, start: int, end: int, args: dict[str, Any]
) -> TraceEvent:
    return {
        "ph": "X",
        "pid": stage,
        "tid": thread,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "name": name,
        "args": args,
    }


def _counter(stage: int, name: str, at: int, parts_bytes: dict[str, int]) -> TraceEvent:
    values = {part: round(count / GIB, 6) for part, count in parts_bytes.items()}
    return {"ph": "C", "pid": stage, "ts": at / 1000, "name": name, "args": values}


def _ns(time_ms: float) -> int:
    return round(time_ms * 1e6)
