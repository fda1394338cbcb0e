"""`planner/cost/copies.py` against Megatron's own manager, with streams that only have a clock."""

import contextlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.planner.cost.copies import ChunkWork, StageCopies
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import Unit
from megatron_autorecompute.profile import HostLink
from tests.planner.random_copies import groups, random_works

pytestmark = pytest.mark.filterwarnings("ignore")
core = pytest.importorskip("megatron.core.pipeline_parallel.fine_grained_activation_offload")
if not hasattr(core, "OffloadTensorPool"):
    pytest.skip("the manager of 0.16 is begun otherwise", allow_module_level=True)


class Stream:
    def __init__(self):
        self.now = 0

    def wait_stream(self, other):
        self.now = max(self.now, other.now)

    def wait_event(self, event):
        self.now = max(self.now, event.at)


class Event:
    def __init__(self, external=False):
        self.at = 0

    def record(self, stream):
        self.at = stream.now


class Tensor:
    device = SimpleNamespace(type="cuda")

    def __init__(self, group):
        self.group, self.shape = group, ()

    def numel(self):
        return self.group.record.host_bytes

    def element_size(self):
        return 1

    def record_stream(self, stream):
        """The model counts a tensor until its copy has ended."""


class Machine:
    """Megatron's manager on clocks; what it copies is written down."""

    def __init__(self, monkeypatch, works, events, link, stage):
        self.works, self.events, self.link, self.stage = works, events, link, stage
        self.compute, self.current = Stream(), []
        self.current.append(self.compute)
        cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            current_stream=lambda: self.current[-1],
            stream=self._stream,
            is_available=lambda: False,
        )
        others = SimpleNamespace(
            fake_tensor=SimpleNamespace(FakeTensor=int),
            functional_tensor=SimpleNamespace(FunctionalTensor=int),
        )
        torch = SimpleNamespace(
            cuda=cuda,
            device=lambda name: name,
            Tensor=int,
            nn=SimpleNamespace(Parameter=int),
            _subclasses=others,
        )
        monkeypatch.setattr(core, "torch", torch)
        monkeypatch.setattr(core, "print_offload_summary_table", lambda _: None)
        monkeypatch.setattr(core, "is_graph_capturing", lambda: False)
        handler = core.ChunkOffloadHandler
        monkeypatch.setattr(handler, "offload", lambda _, tensor, **__: self._offload(tensor))
        monkeypatch.setattr(handler, "reload", lambda _, state: self._reload(state[1]))
        monkeypatch.setattr(core.PipelineOffloadManager, "OFFLOAD_MGR", None)
        self.manager = core.PipelineOffloadManager.get_instance()
        self.pool, self.most = Counter(), Counter()

    @contextlib.contextmanager
    def _stream(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()

    def _offload(self, tensor):
        key = tensor.group.record.name, tensor.group.record.host_bytes
        self.pool[key] += key[1]
        self.most[key] = max(self.most[key], self.pool[key])
        self.current[-1].now += round(key[1] * 1000 / self.link.to_host_gb_per_s)
        self.out[id(tensor)] = self.current[-1].now
        return None, tensor, True

    def _reload(self, tensor):
        stream = self.current[-1]
        if stream is self.compute:  # not begun before; waits, so that the copy has its data
            stream.now = max(stream.now, self.out[id(tensor)])
        else:
            self.asked[id(tensor)] = self.compute.now
        key = tensor.group.record.name, tensor.group.record.host_bytes
        self.pool[key] -= key[1]
        stream.now += round(key[1] * 1000 / self.link.to_device_gb_per_s)
        return tensor

    def step(self, gaps):
        """One step; the begin of each event is delayed by its gap. Returns when events end, and
        bytes that move on the device."""
        self.manager.reset()
        for stream in (self.compute, self.manager.d2h_stream, self.manager.h2d_stream):
            stream.now = 0
        self.out, self.asked, self.forwards = {}, {}, {}
        self.device, ends = {}, []
        for (direction, chunk, microbatch), gap in zip(self.events, gaps, strict=True):
            begin = self.compute.now = self.compute.now + gap
            if direction == "backward":
                self._backward(chunk, microbatch)
            else:
                self._forward(chunk, microbatch, begin)
            ends.append(self.compute.now)
        return ends, moments(self.device)

    @staticmethod
    def _add(changes, at, size):
        changes[at] = changes.get(at, 0) + size

    def _forward(self, chunk, microbatch, begin):
        work, own = self.works[chunk], []
        self.manager.init_model_chunk_offload_handler(self.stage, len(self.works), chunk, 1, 0, 1.0)
        offload_modules.begin_forward(None, None)
        for group, turn in zip(work.groups, work.turns[0], strict=True):
            self.compute.now, record = begin + turn.at_ps, group.record
            handler = self.manager.pop_forward_chunk(record.name)
            handler.on_group_start_forward(record.name)
            tensor = Tensor(group)
            own.append((handler, handler.tensor_push(tensor), tensor))
            self._add(self.device, self.compute.now, record.device_bytes)
            handler.on_group_commit_forward(record.name, [])
            if id(tensor) in self.out:
                self._add(self.device, self.out[id(tensor)], -record.device_bytes)
        self.compute.now = begin + work.times_ps[0]
        self.forwards[chunk, microbatch] = own

    def _backward(self, chunk, microbatch):
        work, own = self.works[chunk], self.forwards[chunk, microbatch]
        done, layers = 0, {}
        for turn in work.turns[1]:
            group = work.groups[turn.group]
            handler, tag, tensor = own[turn.group]
            layers.setdefault(group.unit_ps, self.compute.now + group.unit_ps - done)
            self.compute.now += turn.at_ps - done
            done = turn.at_ps
            if not turn.waits:
                handler.on_group_start_backward()
                continue
            handler.on_group_commit_backward(group.record.name)
            handler.tensor_pop(tag)
            layer, asked = layers[group.unit_ps], self.asked.get(id(tensor))
            if id(tensor) not in self.out:
                self._add(self.device, layer, -group.record.device_bytes)
            elif asked is not None and asked < layer:
                self._add(self.device, asked, group.record.device_bytes)
                self._add(self.device, layer, -group.record.device_bytes)
        self.compute.now += work.times_ps[1] - done


def moments(changes):
    """When bytes change, and by how much in all."""
    return {at: size for at, size in sorted(changes.items()) if size}


@pytest.mark.parametrize("seeds", [range(0, 50), range(50, 100)])
def test_copies_waits_and_bytes_are_those_of_megatron(monkeypatch, seeds):
    waited = [_compared(monkeypatch, random.Random(seed)) for seed in seeds]
    assert 10 < sum(waited) < len(waited), "some wait for copies, some do not"


def _compared(monkeypatch, rng):
    """Whether a random step waits; ours does what Megatron's does."""
    p = rng.randint(1, 4)
    v = rng.choice([1, 1, 2, 3]) if p > 1 else 1
    schedule = Schedule(p, v, p * rng.randint(1, 3) if v > 1 else rng.randint(1, 6))
    stage, works = rng.randrange(p), random_works(rng, v)
    link = HostLink(rng.choice([0.5, 2, 9]), rng.choice([0.5, 2, 9]), 0)
    events = schedule.events(stage)
    gaps = [rng.choice([0, 0, rng.randint(0, 9_000)]) for _ in events]
    machine = Machine(monkeypatch, works, events, link, stage)
    machine.step(gaps)
    ours, now = StageCopies(works, events, link), 0
    for gap in gaps:
        now = ours.run(now + gap)
    for _ in range(2):
        ends, device = machine.step(gaps)
        assert [ran.end_ps for ran in ours.ran] == ends
        assert moments(ours.device) == device
    pooled = sum(machine.most.values())
    assert pooled <= ours.host_bytes <= pooled + (v > 1) * sum(size for _, size in machine.most)
    return ours.stall_ps > 0


def test_an_infinite_link_lets_nothing_wait_and_all_bytes_leave_at_once():
    rng = random.Random(3)
    units = [
        Unit(f"{i}", (i,), 0, 0, 0, 9_000, 18_000, offload_groups=groups(rng)) for i in range(4)
    ]
    work, link = ChunkWork.of(units), HostLink(1e6, 1e6, 0)
    events = Schedule(3, 1, 5).events(0)
    ours = StageCopies([work], events, link)
    assert ours.stall_ps == 0
    now = 0
    for _ in events:
        now = ours.run(now)
    assert (ours.stall_ps, now) == (0, 5 * sum(work.times_ps))
