"""Snapshots in the format of `torch.cuda.memory._dump_snapshot`, of steps that run as planned."""

import itertools
import pickle

from megatron_autorecompute.report.timeline import timeline

SCHEDULES = "/site/megatron/core/pipeline_parallel/schedules.py"
LAYER = "/site/megatron/core/transformer/transformer_layer.py"
CALLED_BY = [
    ("forward", "/site/megatron/core/models/gpt/gpt_model.py", 400),
    ("forward_step", SCHEDULES, 300),
    ("train_step", "/site/megatron/training/training.py", 1200),
]


def frames(*calls):
    return [{"name": n, "filename": f, "line": line} for n, f, line in calls]


ATTENTION = frames(("_forward_attention", LAYER, 520), ("forward", LAYER, 470), *CALLED_BY)
MLP = frames(("_forward_mlp", LAYER, 640), ("forward", LAYER, 472), *CALLED_BY)
OUTSIDE = frames(*CALLED_BY)
ELSEWHERE = frames(("recv_forward", "/site/megatron/core/pipeline_parallel/p2p.py", 90))
OPTIMIZER = frames(("step", "/site/megatron/core/optimizer/distrib_optimizer.py", 2100))
ENGINE = []
"""torch runs a backward in a thread without Python calls."""


class Recorder:
    """Writes down allocations as torch does: an entry of a trace each, blocks for what is left."""

    def __init__(self, device=0):
        self.device, self.trace, self.time_us = device, [], 1_000_000
        self._alive, self._addresses = {}, itertools.count(0x7F0000000000, 1 << 36)

    def _entry(self, action, address, size_bytes, stack):
        entry = {"action": action, "addr": address, "size": size_bytes, "stream": 0}
        self.trace.append({**entry, "time_us": self.time_us, "frames": stack})

    def alloc(self, size_bytes, stack=OUTSIDE):
        size_bytes = int(size_bytes)
        address = next(self._addresses)
        self._alive[address] = size_bytes
        if size_bytes:
            self._entry("alloc", address, size_bytes, stack)
        return address

    def free(self, address):
        size_bytes = self._alive.pop(address)
        for action in ("free_requested", "free_completed") if size_bytes else ():
            self._entry(action, address, size_bytes, ENGINE)

    def briefly(self, size_bytes, stack):
        if size_bytes > 0:
            self.free(self.alloc(size_bytes, stack))

    def snapshot(self, devices=8):
        blocks = [
            {"address": a, "size": -(-s // 512) * 512, "requested_size": s}
            | {"state": "active_allocated", "frames": []}
            for a, s in self._alive.items()
            if s
        ]
        cached = {"address": 1 << 50, "size": 1 << 30, "requested_size": 0, "state": "inactive"}
        segments = [
            {"device": self.device, "address": block["address"], "blocks": [block]}
            for block in [*blocks, cached]
        ]
        traces = [self.trace if d == self.device else [] for d in range(devices)]
        return {"segments": segments, "device_traces": traces, "external_annotations": []}

    def forget(self, count):
        """Lose the oldest entries, as a history of limited length does."""
        del self.trace[:count]


def dumped(snapshot, path):
    path.write_bytes(pickle.dumps(snapshot))
    return path


def as_planned(plan, number, steps=2, more=None, slower=1.3):
    """A recorder after some steps of a stage; `more`: bytes added to what layers keep."""
    stage, recorder = timeline(plan).stages[number], Recorder()
    recorder.alloc(stage.static_bytes, ELSEWHERE)
    for _ in range(steps):
        _Step(plan, stage, recorder, more or {}, slower).run()
    return recorder


class _Step:
    def __init__(self, plan, stage, recorder, more, slower):
        self.plan, self.stage, self.recorder, self.more = plan, stage, recorder, more
        self.begin_us, self.slower = recorder.time_us + 500, slower
        self.held = {}

    def at(self, time_ms):
        self.recorder.time_us = self.begin_us + round(1000 * self.slower * time_ms)

    def run(self):
        stage, recorder = self.stage, self.recorder
        for event, backward in enumerate(stage.backward):
            self.at(stage.start_ms[event])
            between = recorder.alloc(stage.overhead_bytes[event], ELSEWHERE)
            (self.backward if backward else self.forward)(event)
            self.at(stage.end_ms[event])
            recorder.free(between)
        self.at(stage.end_ms[-1] + 10)
        recorder.briefly(max(stage.optimizer_step_peak_bytes, 512), OPTIMIZER)
        recorder.time_us += 5000

    def forward(self, event):
        """A layer allocates its output, which what comes next keeps, and not its input."""
        chunk = self.stage.chunk[event]
        units = self.stage.units[chunk]
        boundary, output = self.plan.profile.boundary_bytes, None
        for number, unit in enumerate(units):
            held = self.held[chunk, self.stage.microbatch[event], number] = []
            if output is not None:
                held.append(output)
            if unit.layers:
                if output is None:
                    held.append(self.recorder.alloc(boundary, OUTSIDE))
                output = self.layer(unit, held)
            else:
                received = 0 if output is None else boundary
                held.append(self.recorder.alloc(unit.held_bytes - received, OUTSIDE))
                self.recorder.briefly(unit.forward_transient_bytes, OUTSIDE)
                output = None
        if output is not None:
            self.recorder.free(output)  # sent on

    def layer(self, unit, held):
        recorder, boundary = self.recorder, self.plan.profile.boundary_bytes
        more = sum(self.more.get(layer, 0) for layer in unit.layers)
        for layer in unit.layers:
            recorder.briefly(512, ATTENTION)
            if layer == unit.layers[0]:
                held.append(recorder.alloc(unit.held_bytes - boundary + more, ATTENTION))
            output = recorder.alloc(boundary, MLP)
            if layer == unit.layers[-1]:
                recorder.briefly(unit.forward_transient_bytes - boundary, MLP)
            else:
                recorder.free(output)
        return output

    def backward(self, event):
        recorder, stage = self.recorder, self.stage
        chunk = stage.chunk[event]
        for number, unit in reversed(list(enumerate(stage.units[chunk]))):
            recorder.briefly(unit.backward_transient_bytes, ENGINE)
            for address in self.held.pop((chunk, stage.microbatch[event], number)):
                recorder.free(address)
