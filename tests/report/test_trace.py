"""A trace says what the plan says, in the form that Perfetto and chrome://tracing read."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace

import pytest

from megatron_autorecompute.cli.program import main
from megatron_autorecompute.profile import MeasuredStep, RankStep, StageRecord, StaticBytes
from megatron_autorecompute.report.trace import (
    COMPUTE,
    P2P,
    RECOMPUTE,
    TO_DEVICE,
    TO_HOST,
    trace,
)
from megatron_autorecompute.units import GIB
from tests.report.plans import THREE, copying_plan, early_plan, example_plan, random_plan

SEEDS = range(20)


@pytest.fixture(scope="module")
def plan():
    return example_plan(*THREE["gpt-760m-48l"])


@pytest.fixture(scope="module")
def events(plan):
    return trace(plan)["traceEvents"]


def slices(events, thread):
    """By stage; begin and end in whole ns."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] == thread:
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            found[event["pid"]].append((begin, begin + length, event["name"]))
    return found


def whole(spans):
    return [span for span in spans if " microbatch " in span[2]]


def test_a_stage_is_a_process_whose_threads_have_names(plan, events):
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if "_name" in e["name"]}
    for stage in range(plan.layout.num_stages):
        assert names[stage, None] == f"stage {stage}"
        threads = [names[stage, thread] for thread in (COMPUTE, P2P, RECOMPUTE)]
        assert threads == ["compute", "p2p", "recompute"]


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_of_a_thread_lie_within_each_other_or_apart(seed):
    events = trace((copying_plan if seed % 3 == 0 else random_plan)(seed))["traceEvents"]
    for thread in (COMPUTE, P2P, RECOMPUTE, TO_HOST, TO_DEVICE):
        for spans in slices(events, thread).values():
            open_ends = []
            for begin, end, _ in sorted(spans, key=lambda span: (span[0], -span[1])):
                while open_ends and open_ends[-1] <= begin:
                    open_ends.pop()
                assert not open_ends or end <= open_ends[-1]
                open_ends.append(end)


def test_what_begins_early_has_slices_of_its_own_before_the_wait_for_its_gradient():
    plan = early_plan()
    events = trace(plan)["traceEvents"]
    computed, waits = slices(events, COMPUTE), slices(events, P2P)
    for stage, cost in enumerate(plan.cost.stages):
        early = [span for span in computed[stage] if span[2].startswith("recompute early")]
        assert len(early) == (plan.schedule.num_microbatches if sum(cost.ahead_ms) else 0)
        for begin, end, _ in early:
            assert all(last <= begin or first >= end for first, last, _ in waits[stage])
        again_ns = sum(end - begin for begin, end, _ in slices(events, RECOMPUTE)[stage])
        assert again_ns == pytest.approx(cost.recompute_ms * 1e6)
    assert any("recompute early" in name for _, _, name in computed[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_event_of_the_schedule_is_a_slice_in_its_order(seed):
    plan = random_plan(seed)
    found = slices(trace(plan)["traceEvents"], COMPUTE)
    for stage, cost in enumerate(plan.cost.stages):
        events = plan.schedule.events(stage)
        drawn = whole(found[stage])
        assert [name for _, _, name in drawn] == [
            f"{event.direction} microbatch {event.microbatch}" for event in events
        ]
        busy_ns = sum(end - begin for begin, end, _ in drawn)
        assert busy_ns == pytest.approx(cost.busy_ms * 1e6, abs=len(events))
    assert max(span[1] for spans in found.values() for span in spans) == pytest.approx(
        plan.cost.step_ms * 1e6, abs=1
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_highest_value_of_the_memory_counter_is_the_planned_peak(seed):
    plan = random_plan(seed)
    events = trace(plan)["traceEvents"]
    for stage, cost in enumerate(plan.cost.stages):
        counted = [
            event["args"]["alive"]
            for event in events
            if event["ph"] == "C" and event["pid"] == stage and "alive" in event["args"]
        ]
        assert max(counted) == round(cost.peak.bytes / GIB, 6)


def test_recompute_has_a_thread_of_its_own_with_the_planned_time(plan, events):
    found = slices(events, RECOMPUTE)
    for stage, cost in enumerate(plan.cost.stages):
        again_ns = sum(end - begin for begin, end, _ in found[stage])
        assert again_ns == pytest.approx(cost.recompute_ms * 1e6, rel=1e-6)


def test_a_message_arrives_when_its_sender_ends_and_a_stage_waits_until_then(events):
    ends = defaultdict(set)
    for stage, spans in slices(events, COMPUTE).items():
        for _, end, name in whole(spans):
            ends[stage, name].add(end)
    arrived = defaultdict(set)
    for event in events:
        if event["ph"] == "i":
            what, sender = event["name"].removeprefix("receive ").split(" from stage ")
            assert round(event["ts"] * 1000) in ends[int(sender), what]
            arrived[event["pid"], f"{what} from stage {sender}"].add(round(event["ts"] * 1000))
    waits = [(stage, *span) for stage, spans in slices(events, P2P).items() for span in spans]
    waits = [wait for wait in waits if wait[-1].startswith("wait for ")]
    assert waits
    for stage, _, end, name in waits:
        assert end in arrived[stage, name.removeprefix("wait for ")]


@pytest.mark.parametrize("seed", range(8))
def test_copies_have_threads_of_their_own_and_what_waits_for_them_shows(seed):
    plan = copying_plan(seed)
    events = trace(plan)["traceEvents"]
    link, m = plan.profile.host_link, plan.schedule.num_microbatches
    offloading = sum("offload" in choice for choice in plan.recompute_policy)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"copies to host", "copies to device"} <= names
    for thread in (TO_HOST, TO_DEVICE):
        found = slices(events, thread)
        assert 0 < sum(map(len, found.values())) <= offloading * m
        for spans in found.values():
            for begin, end, name in spans:
                group, layer = name.split(" of layer ")
                assert group in plan.recompute_policy[int(layer)]
                took_ns = plan.profile.kinds[0].choices[-1].offload_groups[0].host_bytes
                assert end - begin == pytest.approx(took_ns / link.to_host_gb_per_s, abs=1)
    for stage, cost in enumerate(plan.cost.stages):
        own = slices(events, COMPUTE)[stage]
        waits = [span for span in own if span[2] == "wait for copy"]
        backs = {end for _, end, _ in slices(events, TO_DEVICE)[stage]}
        assert sum(e - b for b, e, _ in waits) == pytest.approx(cost.stall_ms * 1e6, abs=9)
        assert all(min(abs(end - back) for back in backs) <= 1 for _, end, _ in waits)
        # A layer computes as long as its record says, between its waits.
        for begin, end, name in own:
            inside = [(b, e) for b, e, what in waits if begin <= b and e <= end]
            if name.startswith("layer "):
                times = {(10.0, 20.0, 27.0)[i] * 1e6 for i in range(3)}
                computed = end - begin - sum(e - b for b, e in inside)
                assert any(computed == pytest.approx(time, abs=2) for time in times)
    busiest = max(span[1] for spans in slices(events, COMPUTE).values() for span in spans)
    assert busiest == pytest.approx(plan.cost.step_ms * 1e6, abs=1)


def test_of_a_measured_step_the_totals_are_given_and_no_events_invented(plan):
    ranks = (RankStep(0, 0, 1.0, 2.0, 0.5), RankStep(1, 3, 1.5, 2.5))
    step = MeasuredStep(12, "none", 4, ranks)
    layers = [tuple(i for chunk in stage for i in chunk.layers) for stage in plan.layout.stages]
    stages = tuple(StageRecord(each, StaticBytes()) for each in layers)
    profile = replace(plan.profile, measured_step=step, stages=stages)
    measured = replace(plan, profile=profile)
    found = trace(measured)
    assert found["otherData"]["measured_step"]["ranks"][1]["backward_compute_ms"] == 2.5
    assert {event["pid"] for event in found["traceEvents"]} == {0, 1, 2, 3}


def test_the_command_writes_a_compressed_file_beside_the_plan_or_where_told(plan, tmp_path, capsys):
    plan.save(tmp_path / "plan.json")
    assert main(["trace", str(tmp_path / "plan.json")]) == 0
    assert "plan.trace.json.gz. Open it in" in capsys.readouterr().out
    other = tmp_path / "other.json"
    assert main(["trace", str(tmp_path / "plan.json"), "-o", str(other)]) == 0
    packed = gzip.decompress((tmp_path / "plan.trace.json.gz").read_bytes())
    assert json.loads(packed) == json.loads(other.read_text()) == trace(plan)
