"""Measured bytes against the paper, against saved tensors, and against the peaks of real steps."""

import itertools
import random
import statistics
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.meta.verify import COMPARABLE
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import FULL, NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.runtime.probe import DEVICE_CLOCK, DeviceClock
from megatron_autorecompute.runtime.samples import Reading, Samples
from megatron_autorecompute.work_order import contains
from testing.ranks import run_ranks
from tests.support import MICRO_BATCH_SIZE, SEQ_LENGTH, VOCAB, microbatch

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
SHAPE = Shape(
    num_layers=10,
    hidden_size=64,
    num_attention_heads=8,
    seq_length=64,
    micro_batch_size=2,
    num_microbatches=3,
    pipeline_stages=1,
    bf16=True,
)
SBH = SHAPE.seq_length * SHAPE.micro_batch_size * SHAPE.hidden_size
AS_OVER_H = SHAPE.num_attention_heads * SHAPE.seq_length / SHAPE.hidden_size


def profiled(shape, fp32_softmax=False, policies=(), clock=DEVICE_CLOCK):
    """A profile of every choice; what autograd saves in a layer; the peaks of some policies."""
    from megatron.core import parallel_state

    from megatron_autorecompute.compare.workload import TrainingJob
    from megatron_autorecompute.compat import model_layers
    from megatron_autorecompute.profile import Model, Parallelism
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=shape.pipeline_stages)
    job = TrainingJob(shape, TEXT)
    for layer, _ in model_layers.numbered_layers(job.chunks):
        layer.self_attention.core_attention.scale_mask_softmax.softmax_in_fp32 = fp32_softmax
    job.step()
    leanest = RecomputePolicy.parse("full", num_layers=shape.num_layers)
    with apply(leanest, job.chunks) as applied:
        measurement = Measurement(ModelShard(job.chunks), applied, clock)
        for _ in measurement.policies():
            with job.memory() as memory, measurement.watch(memory, times=True):
                job.step()
        profile = measurement.profile(
            Model("GPT", shape.num_layers),
            Parallelism(shape.micro_batch_size, shape.seq_length),
            job.static(),
        )
    saved, peaks = {}, []
    if shape.pipeline_stages == 1:
        for text in ("none", "selective[core_attn]", "selective[mlp]", "full"):
            with job.strategy(text):
                saved[text] = saved_bytes(job, layer=4)
    for text in policies:
        with job.strategy(text):
            peaks.append(job.peak_bytes()[0])
    return profile, saved, peaks


def saved_bytes(job, layer):
    """What autograd still saves for a layer after the forward, by its own hooks.

    Independent of the boundaries a Probe watches. Storages are held weakly and read at the end:
    checkpoints save and free, and resize what they recompute to nothing.
    """
    import torch

    from megatron_autorecompute.compat import model_layers, parallel

    model = model_layers.unwrapped(job.chunks[0])
    static = {t.untyped_storage()._cdata for t in [*model.parameters(), *parallel.global_buffers()]}
    running, seen = [None], {}

    def entering(index):
        return lambda *_: running.__setitem__(0, index)

    handles = [
        module.register_forward_pre_hook(entering(index))
        for module, index in model_layers.numbered_layers([model])
    ]

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in static:
            drop = weakref.ref(storage, lambda _, key=storage._cdata: seen.pop(key, None))
            seen.setdefault(storage._cdata, (running[0], drop))
        return tensor.detach() if tensor.grad_fn is not None else tensor

    size = {"micro_batch_size": job.shape.micro_batch_size, "seq_length": job.shape.seq_length}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**microbatch(**size))
    for handle in handles:
        handle.remove()
    total = sum(storage().nbytes() for at, storage in seen.values() if at == layer)
    del output
    return total


@pytest.fixture(scope="module")
def measured():
    return run_ranks(profiled, 1, SHAPE)[0]


def units(profile, choice):
    """Held bytes of a choice in the paper's unit, s·b·h bytes."""
    return profile.kinds[0].record(choice).held_bytes / SBH


# LayerNorm keeps mean and 1/std of every token, 2 + 2 bytes, twice a layer: the paper omits them.
STATISTICS = 8 / SHAPE.hidden_size
# Korthikanti et al. 2022, section 4.1, by what recomputing a module gives back.
CORE_ATTENTION = 5 * AS_OVER_H
LAYERNORM_OUTPUTS = 2 + 2
GELU_INPUT_AND_OUTPUT = 8 + 8


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", 34 + CORE_ATTENTION + STATISTICS),
        ("selective[core_attn]", 34 + STATISTICS),
        ("selective[layernorm]", 34 + CORE_ATTENTION - LAYERNORM_OUTPUTS),
        ("selective[mlp]", 34 + CORE_ATTENTION + STATISTICS - GELU_INPUT_AND_OUTPUT),
        ("selective[core_attn+layernorm+mlp]", 34 - LAYERNORM_OUTPUTS - GELU_INPUT_AND_OUTPUT),
        ("full", 2),
    ],
)
def test_held_bytes_are_the_papers_formula(measured, choice, expected):
    profile, _, _ = measured
    assert units(profile, choice) == pytest.approx(expected, abs=1e-3)


@pytest.mark.any_version
def test_softmax_in_fp32_holds_its_output_and_input_in_four_bytes():
    shape = replace(SHAPE, num_layers=9, num_microbatches=1)
    profile, _, _ = run_ranks(profiled, 1, shape, True)[0]
    # Two more bytes an element of the softmax output: 2·a·s/h. The paper has it in 16 bits.
    expected = 34 + CORE_ATTENTION + 2 * AS_OVER_H + STATISTICS
    assert units(profile, "none") == pytest.approx(expected, abs=1e-3)


@pytest.mark.any_version
@pytest.mark.parametrize("choice", ["none", "selective[core_attn]", "selective[mlp]", "full"])
def test_held_bytes_are_what_autograd_saves(measured, choice):
    profile, saved, _ = measured
    held = profile.kinds[0].record(choice).held_bytes
    assert held == pytest.approx(saved[choice], rel=1e-3)


@pytest.mark.any_version
def test_recompute_holds_less_and_has_more_in_transit(measured):
    profile, _, _ = measured
    none, full = (profile.kinds[0].record(choice) for choice in ("none", "full"))
    assert full.held_bytes < none.held_bytes / 20
    assert full.backward_transient_bytes > none.held_bytes


@pytest.mark.any_version
def test_measured_profile_predicts_the_peaks_of_policies_it_never_saw():
    shape = replace(SHAPE, num_layers=12, pipeline_stages=2, num_microbatches=2)
    chooser = random.Random(0)
    chosen = ["none", "selective[core_attn]", "selective[mlp]", "selective[layernorm]", "full"]
    mixes = [",".join(chooser.choices(chosen, k=12)) for _ in range(3)]
    policies = ("none", "full/3*6,none*6", "full/2*2,none*4,full/6*6", *mixes)
    ranks = run_ranks(profiled, 2, shape, False, policies)
    layout, schedule = Layout.from_flags(12, 2), Schedule(2, 1, 2)
    for number, text in enumerate(policies):
        policy = RecomputePolicy.parse(text, num_layers=12)
        cost = evaluate(ranks[0][0], layout, schedule, policy)
        for stage in (0, 1):
            predicted = cost.stages[stage].peak
            activations = ranks[stage][2][number] - predicted.breakdown.static_bytes
            error = predicted.bytes - ranks[stage][2][number]
            assert -0.002 * activations <= error <= 0.005 * activations, (text, stage, error)


def test_all_ranks_put_together_the_same_profile():
    shape = replace(SHAPE, num_layers=4, pipeline_stages=2, num_microbatches=2)
    first, second = (rank[0] for rank in run_ranks(profiled, 2, shape))
    assert first == second
    assert [stage.layers for stage in first.stages] == [(0, 1), (2, 3)]
    assert first.kinds[0].layers == (0, 1, 2, 3)


def measured_by_a_clock_of_chance(shape):
    """A profile whose times have nothing to do with what ran."""
    moments, calls = random.Random(0), itertools.count()

    class OfChance(DeviceClock):
        def now(self):
            return moments.uniform(0, 1) + 10 * next(calls)

    return profiled(shape, clock=OfChance())[0]


@pytest.mark.any_version
def test_whatever_the_clock_says_doing_more_is_not_recorded_as_faster():
    shape = replace(SHAPE, num_layers=4, hidden_size=64, seq_length=32, num_microbatches=1)
    (kind,) = run_ranks(measured_by_a_clock_of_chance, 1, shape)[0].kinds
    records = [(LayerPolicy.parse(r.choice), r) for r in kind.choices]
    for (larger, more), (smaller, less) in itertools.permutations(records, 2):
        if contains(larger, smaller):
            assert more.backward_ms > less.backward_ms
            assert more.forward_ms + more.backward_ms > less.forward_ms + less.backward_ms
    assert sum(contains(a, b) for (a, _), (b, _) in itertools.permutations(records, 2)) > 20


def samples(ways):
    """Of some turns, each with times of readings on the device and on the host."""
    readings = [Reading(turn, turn, *way) for turn, own in enumerate(ways) for way in own]
    return Samples([1], [0], [1], [1], forward=readings, backward=readings)


def test_a_time_is_the_lower_quartile_and_turns_that_differ_are_seen_to():
    turns = [[(ms + 10.0 * turn, 1.0) for ms in (1.0, 2.0, 3.0, 9.0)] for turn in range(3)]
    record = samples(turns).record(FULL, 0)
    everything = [ms for turn in turns for ms, _ in turn]
    assert record.forward_ms == record.backward_ms == np.percentile(everything, 25)
    assert record.spread_ms == pytest.approx(np.subtract(*np.percentile([1, 2, 3, 9], [75, 25])))
    assert record.turn_spread_ms == pytest.approx(2 * np.std([0.0, 10.0, 20.0], ddof=1))
    assert (record.runs, record.turns) == (12, 3)


def test_what_waited_for_launches_is_no_time_of_the_device_and_what_waits_for_it_is_of_both():
    launched_ahead = samples([[(5.0, 3.0, False), (2.0, 3.0, True), (2.0, 3.0, True)]])
    record = launched_ahead.record(NONE, 0)
    assert (record.forward_ms, record.runs) == (2.0, 2)
    assert (record.host.forward_ms, record.host.forward_waits) == (3.0, False)
    never_ahead = samples([[(5.0, 40.0, False)] * 4]).record(NONE, 0)
    assert (never_ahead.forward_ms, never_ahead.host.forward_ms) == (5.0, 5.0)
    assert never_ahead.host.forward_waits
    assert samples([[(5.0,)] * 4]).record(NONE, 0).host is None


def routed_unevenly(microbatches):
    """What each rank's moe layers held with most tokens going to rank 0's experts; the profile."""
    import torch

    from megatron_autorecompute.profile import Model, Parallelism, StaticBytes
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.live_bytes import LiveBytes
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard
    from tests.support import start_parallel, tiny_config, tiny_gpt

    start_parallel(expert_model_parallel_size=2)
    config = tiny_config("moe", num_layers=2, expert_model_parallel_size=2)
    (model,) = tiny_gpt(config)
    for layer in model.decoder.layers:
        layer.pre_mlp_layernorm.bias.data.fill_(1.0)
        layer.mlp.router.weight.data[:2] += 0.01
    static = list(model.parameters())
    for parameter in static:
        parameter.main_grad = torch.zeros_like(parameter)

    def step(count):
        for number in range(count):
            seed = number * 2 + torch.distributed.get_rank()
            model(**microbatch(seed)).float().mean().backward()
            for parameter in static:
                parameter.grad = None

    step(1)  # allocates what stays
    held = []
    with apply(RecomputePolicy((NONE, NONE)), model) as applied:
        measurement = Measurement(ModelShard([model]), applied)
        full = RecomputePolicy.parse("full", num_layers=2)
        for policy in (RecomputePolicy((NONE, NONE)), full):
            applied.switch(policy)
            with LiveBytes(static) as memory, measurement.watch(memory):
                step(microbatches)
            if policy != full:
                (kind,) = measurement.shard.kinds
                held = list(measurement.samples[kind.signature, NONE].held_bytes)
        profile = measurement.profile(Model("GPT", 2), Parallelism(2, 32), StaticBytes())
    return held, profile


@pytest.mark.any_version
def test_layers_with_experts_are_planned_at_the_percentile_of_the_fullest_rank():
    microbatches = 20
    (first, profile), (second, _) = run_ranks(routed_unevenly, 2, microbatches)
    record = profile.kinds[0].record("none")
    assert len(first) == len(second) == 2 * microbatches  # two layers
    assert statistics.mean(first) > 1.2 * statistics.mean(second)
    for percentile, place in ((50, 20), (90, 36), (100, 40)):
        at = record.at_percentile(percentile)
        assert at.held_bytes - profile.boundary_bytes == sorted(first)[place - 1]
    assert record.at_percentile(None) == record
    assert record.held_bytes == record.at_percentile(100).held_bytes
    # Not the most: gloo lets go of a buffer it has sent when it likes.
    full = profile.kinds[0].record("full")
    assert full.at_percentile(50).held_bytes == profile.boundary_bytes
    layout, schedule = Layout.from_flags(2, 1), Schedule(1, 1, 1)
    peaks = [
        Problem(profile, layout, schedule, percentile=p)
        .cost(RecomputePolicy.parse("none", num_layers=2))
        .stages[0]
        .peak.bytes
        for p in (50, 90, 100, None)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2] == peaks[3]


@pytest.mark.any_version
def test_layers_without_experts_have_no_percentiles(measured):
    profile, _, _ = measured
    assert all(record.percentiles == () for record in profile.kinds[0].choices)


def measured_with_depths(stages, depths, policies):
    """A profile whose clock counts the operations that ran, and peaks of Megatron's schedule."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    from megatron_autorecompute.meta.fake_ranks import StepShape
    from megatron_autorecompute.meta.meta_step import (
        kept_between_steps,
        trace_step,
    )
    from megatron_autorecompute.profile import Model, Parallelism, StaticBytes
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.live_bytes import LiveBytes
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard
    from testing.meta_stages import TokenStep
    from tests.support import start_parallel, tiny_config, tiny_gpt

    class Operations(TorchDispatchMode):
        total = 0  # torch's own FlopCounterMode hooks into modules, which keeps tensors alive

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            count = flop_registry.get(function.overloadpacket)
            self.total += count(*args, **(kwargs or {}), out_val=result) if count else 0
            return result

        def now(self):
            return self.total

        def ms_between(self, begin, end):
            return end - begin

    start_parallel(pipeline_model_parallel_size=stages)
    config = tiny_config(
        num_layers=2, mtp_num_layers=depths, pipeline_model_parallel_size=stages, dropout=0.0
    )
    chunks = tiny_gpt(config)
    size = StepShape(SEQ_LENGTH, MICRO_BATCH_SIZE, 2, VOCAB)
    microbatch = TokenStep(size, torch.device("cpu"))

    def step():
        get_forward_backward_func()(
            forward_step_func=microbatch,
            data_iterator=None,
            model=chunks[0],
            num_microbatches=size.num_microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )

    policy = [RecomputePolicy.parse(text, num_layers=2 + depths) for text in policies]
    with apply(policy[0], chunks) as applied, Operations() as operations:
        step()
        in_a_step = operations.total
        parameters = list(chunks[0].parameters())
        static = [*microbatch.static, *parameters, *(p.grad for p in parameters)]
        measurement = Measurement(ModelShard(chunks), applied, operations)
        for _ in measurement.policies():
            with (
                LiveBytes(static) as live,
                kept_between_steps(chunks, live),
                measurement.watch(live),
            ):
                step()
        model = Model("GPT", 2, depths)
        profile = measurement.profile(
            model, Parallelism(MICRO_BATCH_SIZE, SEQ_LENGTH), StaticBytes()
        )
        peaks = []
        for each in policy:
            applied.switch(each)
            peaks.append(trace_step(chunks, size, microbatch).peak_bytes)
    return profile, in_a_step, peaks


@pytest.mark.any_version
@pytest.mark.parametrize(("stages", "depths"), [(1, 2), (2, 1)])
def test_depths_and_head_take_all_of_their_stretches_and_peak_as_megatrons_schedule(stages, depths):
    policies = ("none", "full", f"none*2,full*{depths}", f"full*2,none*{depths}")
    ranks = run_ranks(measured_with_depths, stages, stages, depths, policies)
    profile = ranks[0][0]
    dense, *of_depths = profile.kinds
    assert [kind.layers for kind in of_depths] == [(2 + depth,) for depth in range(depths)]
    tokens, hidden = SEQ_LENGTH * MICRO_BATCH_SIZE, 64
    projection, logits = 2 * tokens * 2 * hidden * hidden, 2 * tokens * hidden * VOCAB
    layer = dense.record("none")
    for kind in of_depths:
        none, full = kind.record("none"), kind.record("full")
        assert none.forward_ms == pytest.approx(layer.forward_ms + projection)
        assert none.backward_ms == pytest.approx(layer.backward_ms + 2 * projection)
        assert full.backward_ms == pytest.approx(none.backward_ms + none.forward_ms)
    head = profile.head
    assert head.forward_ms == pytest.approx((1 + depths) * logits)
    assert head.backward_ms == pytest.approx((1 + depths) * 2 * logits)
    records = [layer] * 2 + [kind.record("none") for kind in of_depths]
    a_microbatch = sum(r.forward_ms + r.backward_ms for r in (*records, profile.final_norm, head))
    assert a_microbatch * 2 == pytest.approx(sum(in_a_step for _, in_a_step, _ in ranks))

    layout = Layout.from_flags(2, stages, mtp_num_layers=depths)
    bare = replace(profile, stages=tuple(replace(s, **COMPARABLE) for s in profile.stages))
    problem = Problem(bare, layout, Schedule(stages, 1, 2))
    for number, text in enumerate(policies):
        cost = problem.cost(RecomputePolicy.parse(text, num_layers=2 + depths))
        assert all(stage.recompute_ms >= 0 for stage in cost.stages)
        for stage, (_, _, peaks) in zip(cost.stages, ranks, strict=True):
            assert stage.peak.bytes == pytest.approx(peaks[number], rel=0.005), (text, stage.stage)


def steps_in_turns():
    """Which steps are timed where nothing is beside the host, and beside a device."""
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard
    from megatron_autorecompute.runtime.probe import Host
    from tests.support import start_parallel, tiny_config, tiny_gpt

    start_parallel()
    (model,) = tiny_gpt(tiny_config(num_layers=12))
    with apply(RecomputePolicy((NONE,) * 12), model) as applied:
        measured = [Measurement(ModelShard([model]), applied, host=h) for h in (None, Host())]
        return [list(measurement.turns(microbatches=4)) for measurement in measured]


def test_the_step_after_a_switch_is_timed_where_no_device_is_ahead_or_behind():
    alone, beside_a_device = run_ranks(steps_in_turns, 1)[0]
    assert alone == [True] * 4
    assert beside_a_device == [False, True] * 4
