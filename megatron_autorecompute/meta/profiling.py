"""Makes a profile without a device: the same measurement as in a job, on meta tensors.

Bytes come from the tensors that Megatron's own code keeps alive, times from `roofline`. The
assumptions are listed in the profile and printed with every result made from it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any, NamedTuple

import torch

from megatron_autorecompute.compat import model_facts, model_layers, rules
from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.meta import expert_rows
from megatron_autorecompute.meta.attention import with_backend
from megatron_autorecompute.meta.devices import SHARES, Device, Efficiency
from megatron_autorecompute.meta.graph_layers import (
    with_graph_fields,
    with_graphs,
    without_refused,
)
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import Resolved
from megatron_autorecompute.meta.kept_bytes import (
    Counted,
    Dispatchers,
    deferred_output_layer,
    parts_of_stages,
)
from megatron_autorecompute.meta.layer_parts import with_parts
from megatron_autorecompute.meta.lengths import profile_lengths
from megatron_autorecompute.meta.measured_records import LAYER_FIELDS
from megatron_autorecompute.meta.meta_step import kept_between_steps
from megatron_autorecompute.meta.model import (
    LEFT_OUT,
    MAX_CHOICES,
    JobKind,
    JobStep,
    Shard,
    add_main_gradients,
    check_fields,
    job_kinds,
    shard,
)
from megatron_autorecompute.meta.offload_records import (
    check_whole_layers,
    with_inert_offload,
    with_whole_layers,
)
from megatron_autorecompute.meta.roofline import Roofline, Spread, Traffic
from megatron_autorecompute.meta.static_bytes import Parameters
from megatron_autorecompute.meta.step_end import step_end_ms
from megatron_autorecompute.policy import (
    NONE,
    OWN_MODULES,
    WHOLE_LAYER,
    LayerPolicy,
    RecomputePolicy,
)
from megatron_autorecompute.profile import (
    ChoiceRecord,
    Imbalance,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StaticBytes,
)
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.layer_checkpoints import skips_dead_work
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.measurement import Measurement
from megatron_autorecompute.runtime.model_shard import Choices, ModelShard, alone, choices
from megatron_autorecompute.runtime.model_shard import kinds as kinds_of
from megatron_autorecompute.runtime.offload import OffloadCounter, with_offload, without_parts

Progress = Callable[[str], None]
ChoicesOf = Callable[[torch.nn.Module], Choices]


def profile_job(
    job: Job,
    device: Device,
    efficiency: Efficiency | None = None,
    progress: Progress = lambda _: None,
    clock_type: type[Roofline] = Roofline,
    only: Sequence[str] | None = None,
    offload: Sequence[tuple[str, ...]] = (),
) -> Profile:
    """Profile every choice of every kind of layer of a job, without running it.

    Args:
        job: the training job.
        device: the device whose peak rates the times are computed from.
        efficiency: what is assumed of its kernels and links; by default `device.reaches`.
        progress: called with a sentence before each step.
        clock_type: what the times are of.
        only: modules; beside none and full, only their set is profiled, of each kind those that it
            has. By default every choice, which takes many times as long.
        offload: sets of `offload_modules`, each profiled beside every set of recomputed modules;
            and `cpu_offloading`, of which a layer that recomputes nothing has a record.

    Raises OptionError, PipelineError and MachineError if the job cannot be read or built.
    """
    efficiency = efficiency or device.reaches
    job = with_backend(job, device)
    _refuse_together(job, offload)
    if job.max_tokens_per_microbatch:
        return profile_lengths(
            job, lambda one: profile_job(one, device, efficiency, progress, clock_type, only)
        )
    _check(job, device, offload)
    clock = functools.partial(clock_type, device, _reached(job, efficiency), traffic(job))
    every = every_choice if only is None else functools.partial(_set_of, only)
    modules = [names for names in offload if names != (WHOLE_LAYER,)]
    if modules:
        every = functools.partial(_with_offload, every, modules)
    profile, counted = _model(job, clock, every, progress)
    kinds = tuple(with_inert_offload(kind, modules) for kind in with_inert(profile.kinds))
    kinds, refused = _beside_graphs(job, kinds, clock, progress)
    end_ms = longest_end_ms(job, device, efficiency, counted.parameters_of_stages(), kinds)
    profile = replace(
        profile,
        kinds=kinds,
        step_end_ms=profile.step_end_ms + end_ms,
        host_link=device.host_link,
        fingerprint=_fingerprint(job, device, efficiency),
        assumptions=(*assumed(job, device, efficiency), *refused),
    )
    profile = with_whole_layers(job, profile) if len(modules) < len(offload) else profile
    if any(record.offload_groups for kind in profile.kinds for record in kind.choices):
        return replace(profile, assumptions=(*profile.assumptions, device.assumed_of_host))
    return profile


def _check(job: Job, device: Device, offload: Sequence[tuple[str, ...]]) -> None:
    """Refuse what cannot be profiled before anything is built."""
    job.layout(), job.schedule()
    check_fields(job)
    device.check(job.precision)
    for modules in offload:
        rules.check_known(LayerPolicy(offload=modules), f"offload {'+'.join(modules)}")
    if (WHOLE_LAYER,) in offload:
        check_whole_layers(job)


def _reached(job: Job, efficiency: Efficiency) -> Efficiency:
    """What the job's own kernels and graphs reach."""
    if job.resolved.attention_backend == "flash":
        efficiency = efficiency.scaled("attention", efficiency.flash)
        efficiency = efficiency.scaled("attention_backward", efficiency.flash)
    if job.graphs.of_iteration:
        return efficiency.with_host(0)  # one graph starts everything
    return efficiency


def _model(
    job: Job, clock: Callable[[], Roofline], every: ChoicesOf, progress: Progress
) -> tuple[Profile, Counted]:
    """What the shards show of the whole model, and what is counted of its stages. The step's end is
    only what EP overlap cannot hide."""
    decoder, whole = _decoder_and_whole(job, clock, every, progress)
    mtp = tuple(kind for kind in whole.kinds if min(kind.layers) >= job.num_layers)
    kinds = (*(k for k in decoder.kinds if min(k.layers) < job.num_layers), *mtp)
    seen, counted = decoder.shown, decoder.counted.with_ends_of(whole.counted)
    alone_ms = 0.0
    if job.resolved.overlap_moe_expert_parallel_comm:
        alone_ms = _alone_ms(job, clock(), kinds, progress)
        if job.pattern is None:
            progress(f"{job.name}: layers in parts, a forward beside a backward")
            kinds = with_parts(replace_mtp(job, 0), kinds, seen.boundary_bytes)
    facts = _facts(job, decoder.layer_facts)
    profile = replace(
        seen,
        model=Model(job.name, job.num_layers, job.mtp_num_layers, facts=facts),
        kinds=kinds,
        head=whole.shown.head,
        final_norm=whole.shown.final_norm,
        stages=tuple(counted.stage(*parts) for parts in parts_of_stages(job)),
        embedding_static=counted.embedding,
        head_static=counted.head,
        step_end_ms=alone_ms,
        deallocate_pipeline_outputs=job.resolved.deallocate_pipeline_outputs,
        overlap_p2p_comm=job.resolved.overlap_p2p_comm,
        deferred=deferred_output_layer(job),
        graph_of_iteration=job.graphs.of_iteration,
    )
    return profile.each_record(functools.partial(_modelled, job)), counted


def _refuse_together(job: Job, offload: Sequence[Sequence[str]]) -> None:
    graphs, overlap = job.graphs, job.resolved.overlap_moe_expert_parallel_comm
    lengths = bool(job.max_tokens_per_microbatch)
    for refused, first, second in (
        (lengths and offload, "max_tokens_per_microbatch", "records of offload"),
        (lengths and graphs.implementation != "none", "max_tokens_per_microbatch", "CUDA graphs"),
        (offload and graphs.of_layers, "records of offload", "CUDA graphs of layers"),
        (offload and overlap, "records of offload", "EP overlap"),
    ):
        if refused:
            raise OptionError(
                f"{job.name}: {first} beside {second} is not modelled. Leave one of them out."
            )


def _beside_graphs(
    job: Job, kinds: tuple[LayerKind, ...], clock: Callable[[], Roofline], progress: Progress
) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    """The kinds with what the job's CUDA graphs change, and what Megatron refuses beside them."""
    if job.graphs.implementation == "none":
        return kinds, ()
    asked, left_out = with_graph_fields(job, job.graphs.implementation)
    kinds, refused = without_refused(asked, kinds, left_out)
    if not counts_graphs(job):
        return kinds, refused
    progress(f"{job.name}: layers as CUDA graphs")
    return with_graphs(job, kinds, clock()), refused


def counts_graphs(job: Job) -> bool:
    """Whether layers have records of CUDA graphs."""
    return job.graphs.of_layers and not job.resolved.overlap_moe_expert_parallel_comm


def traffic(job: Job) -> Traffic:
    """How the job communicates."""
    return Traffic(
        userbuffers=job.resolved.tp_comm_overlap,
        expert_alltoall=job.resolved.overlap_moe_expert_parallel_comm,
        spread=_spread(job.resolved) if job.dispatcher not in ("alltoall", "allgather") else None,
        used=expert_rows.share_used(job),
    )


def _spread(config: Resolved) -> Spread:
    groups, chosen = config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    return Spread(config.num_moe_experts or 1, config.moe_router_topk, groups, chosen)


def replace_mtp(job: Job, depths: int) -> Job:
    """The job with another number of MTP depths."""
    config = {**job.config, "mtp_num_layers": depths or None}
    pattern = job.pattern
    if pattern is not None:
        config["hybrid_layer_pattern"] = str(replace(pattern, mtp_num_layers=depths))
    return replace(job, config=config)


class _Part(NamedTuple):
    """What one shard shows."""

    shown: Profile
    kinds: tuple[LayerKind, ...]
    """Kinds of the whole model."""
    counted: Counted
    layer_facts: dict[str, Any]


def _decoder_and_whole(
    job: Job, clock: Callable[[], Roofline], every: ChoicesOf, progress: Progress
) -> tuple[_Part, _Part]:
    """The decoder's layers, and the model with MTP depths: one shard, or two where the depths are
    on another stage. There they have a copy of the embedding's weights. On one stage both share it,
    and its gradient from the depths waits for that of the first layer."""
    if not (job.mtp_num_layers and job.size("pipeline") > 1):
        part = _part(job, clock(), _choices_of_kinds(job, every), every, progress)
        return part, part
    without = replace_mtp(job, 0)
    decoder = _part(without, clock(), _choices_of_kinds(without, every), every, progress)
    last = [0] * (len(job_kinds(job)) - 1) + [1]  # the depths are built like this layer
    return decoder, _part(job, clock(), last, every, progress)


def _choices_of_kinds(job: Job, every: ChoicesOf) -> list[int]:
    """How many layers of each kind are needed to run all of its choices in one step, or in two if
    some offload."""
    with shard(job, [1] * len(job_kinds(job))) as built:
        kinds = kinds_of([built.model], every)
    numbers: dict[int, int] = {}
    for kind in kinds:
        moved = sum(bool(choice.offload) for choice in kind.choices)
        numbers |= dict.fromkeys(kind.layers, max(moved, len(kind.choices) - moved))
    return [numbers[layer] for layer in built.kind_of]


def _part(
    job: Job, clock: Roofline, copies: Sequence[int], every: ChoicesOf, progress: Progress
) -> _Part:
    progress(f"{job.name}: building one rank's layers on meta tensors")
    with shard(job, copies) as built:
        measured, kept, dispatchers = _measured(job, built, clock, every, progress)
        counted = Counted(job, built, clock.device, kept, dispatchers.kept_bytes)
        own = map(dispatchers.counted_once, measured.kinds)
        kinds = tuple(_kind(job, kind, built, counted) for kind in own)
        config = model_facts.of_config(model_layers.unwrapped(built.model).config)
    facts = {name: config[name] for name in LAYER_FIELDS if name in config}
    return _Part(measured, kinds, counted, facts)


def _alone_ms(job: Job, clock: Roofline, kinds: Sequence[LayerKind], progress: Progress) -> float:
    """What EP overlap cannot hide: in a stage's forwards before its first backward, and in as many
    backwards at the end, nothing runs beside the experts' all-to-alls (megatron-core
    pipeline_parallel/combined_1f1b.py)."""
    decoder = replace_mtp(job, 0)
    apart = replace(traffic(job), expert_alltoall=False)
    clock = type(clock)(clock.device, clock.efficiency, apart)
    every = functools.partial(_set_of, ())
    alone = _part(decoder, clock, _choices_of_kinds(decoder, every), every, progress)
    beside_ms, alone_ms = _none_ms(kinds), _none_ms(alone.kinds)
    more_ms = {layer: ms - beside_ms[layer] for layer, ms in alone_ms.items()}
    schedule = job.schedule()
    return max(
        schedule.warmup(stage)
        / schedule.num_chunks
        * sum(more_ms.get(layer, 0.0) for layer in layers)
        for stage, (layers, _, _) in enumerate(parts_of_stages(job))
    )


def _none_ms(kinds: Sequence[LayerKind]) -> dict[int, float]:
    """The time of a forward and a backward without recompute, by layer."""
    found = {index: kind.record(NONE) for kind in kinds for index in kind.layers}
    return {index: one.forward_ms + one.backward_ms for index, one in found.items() if one}


def with_inert(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Add to every kind, as inert choices, the sets of modules that only other kinds have.

    Megatron's `recompute_modules` are one list for all layers: mlp does nothing on a MoE layer.
    """
    modules = sorted(set[str]().union(*map(_modules, kinds)) - set(OWN_MODULES))
    sizes = range(1, len(modules) + 1)
    sets = [
        LayerPolicy("selective", chosen)
        for size in sizes
        for chosen in itertools.combinations(modules, size)
    ]
    choices = [*sets, *(replace(each, rerun_all=True) for each in sets if each.has_dead_work)]
    return tuple(replace(kind, inert=kind.inert | _equals(kind, choices)) for kind in kinds)


def _equals(kind: LayerKind, choices: Sequence[LayerPolicy]) -> dict[str, str]:
    """Choices without a record of the kind, and the choices with a record that they equal."""
    own = _modules(kind)
    inert = {}
    for choice in choices:
        here = tuple(module for module in choice.modules if module in own)
        less = LayerPolicy("selective", here) if here else NONE
        equal = kind.record(replace(less, rerun_all=choice.rerun_all)) or kind.record(less)
        if equal is not None and kind.record(choice) is None:
            inert[str(choice)] = equal.choice
    return inert


def _modules(kind: LayerKind) -> set[str]:
    choices = [*(record.policy for record in kind.choices), *kind.equals]
    return {module for choice in choices for module in choice.modules}


def _measured(
    job: Job, built: Shard, clock: Roofline, every: ChoicesOf, progress: Progress
) -> tuple[Profile, list[torch.Tensor], Dispatchers]:
    """The shard's records, tensors that stay between steps, and what its layers keep."""
    model = built.model
    step = JobStep(job)
    in_fp32 = job.accumulate_allreduce_grads_in_fp32
    static, _ = static_tensors(job, model, step, dummies=job.makes_dummies, in_fp32=in_fp32)

    def forward() -> torch.Tensor:
        return step(None, model)[0].float().mean()

    whole = ModelShard([model], all_gather=alone, choices_of=every)
    with (
        apply(nothing(job, built), model, groups=()) as applied,
        LiveBytes(static) as live,
        kept_between_steps([model], live) as kept,
        OffloadCounter([model], clock, whole.may_offload).watching() as offloaded,
    ):
        measurement = Measurement(whole, applied, clock, left=lambda: offloaded.found)
        dispatchers = Dispatchers(model, live)
        for number, _ in enumerate(measurement.policies()):
            progress(f"{job.name}: step {number + 1} on meta tensors")
            # One microbatch is in flight, as in a pipeline. So what a MoE layer's dispatcher keeps
            # until the next forward exists before the watched forward, not on top of it.
            earlier = forward()
            if not job.resolved.overlap_moe_expert_parallel_comm:
                dispatchers.after_forward(applied.policy.layers)
            offloaded.begin()
            with clock, measurement.watch(live):
                loss = forward()
                loss.backward()
            offloaded.keep(applied.policy.layers)
            del earlier, loss
            dispatchers.after_step(applied.policy.layers)
        profile = shown(job, built, measurement)
    return profile, [*kept, *step.static], dispatchers


def nothing(job: Job, built: Shard) -> RecomputePolicy:
    """The policy of a shard that recomputes nothing."""
    return RecomputePolicy((NONE,) * (len(built.kind_of) + job.mtp_num_layers))


def static_tensors(
    job: Job, model: Any, step: JobStep, **gradients: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of a shard that stay from step to step, and the main gradients among them, which
    are made as `add_main_gradients` says."""
    parameters = [*model.parameters(), *_own_embedding(job, model)]
    made = add_main_gradients(parameters, **gradients)
    return [*parameters, *made, *model.buffers(), *step.static], made


def shown(job: Job, built: Shard, measurement: Measurement) -> Profile:
    """What a shard's steps showed; raises ProfileError if they did not show every choice."""
    if unseen := measurement.unseen():
        names = ", ".join(f"{choice} ({kind.name})" for choice, kind in unseen)
        raise ProfileError(
            f"{job.name}: the steps of one layer of every kind showed nothing of {names}. Measure "
            "this model in the job, by auto, or report the config."
        )
    model = Model(job.name, len(built.kind_of), job.mtp_num_layers)
    return measurement.profile(model, parallelism(job), StaticBytes())


def _own_embedding(job: Job, model: Any) -> list[torch.nn.Parameter]:
    """Give the head, and MTP depths, the copy of the embedding that their stage has. One weight for
    both ends would have one gradient, which waits for the embedding's part of it."""
    tied = not job.untie_embeddings_and_output_weights
    if job.size("pipeline") == 1 or not (tied or job.mtp_num_layers):
        return []
    groups = torch.distributed.ProcessGroup  # cannot be copied
    shared = [v for m in model.embedding.modules() for v in vars(m).values()]
    own = copy.deepcopy(model.embedding, {id(v): v for v in shared if isinstance(v, groups)})

    def replaced(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "embedding": own}

    if tied:
        model.shared_embedding_or_output_weight = lambda: own.word_embeddings.weight
    if job.mtp_num_layers:
        model.mtp.register_forward_pre_hook(replaced, with_kwargs=True)
    return list(own.parameters())


def every_choice(layer: Any) -> Choices:
    """All sets of modules, because a step costs no device time, and what Megatron's own checkpoints
    run of each where ours rerun less.

    core_attn under fused attention is one of them, though it hardly pays: Megatron's own settings
    name it. It runs attention again, and mostly holds more: the checkpoint saves its inputs, of
    which v is a view of the whole projection (megatron-core transformer/attention.py
    `_checkpointed_attention_forward`).
    """
    found = choices(layer, rules.usable_modules(layer), MAX_CHOICES)
    megatrons = (replace(c, rerun_all=True) for c in found if skips_dead_work(layer, c))
    return (*found, *(choice for choice in megatrons if choice.is_megatrons))


def _with_offload(every: ChoicesOf, sets: Sequence[Sequence[str]], layer: Any) -> Choices:
    return with_offload(without_parts(every(layer)), layer, sets)


def _set_of(modules: Sequence[str], layer: Any) -> Choices:
    """None, full, and the set of the modules that the layer has."""
    usable = {name for name in rules.usable_modules(layer) if name in modules}
    found = every_choice(layer)
    plain = [c for c in found if not c.keep]
    return tuple(c for c in plain if c.granularity != "selective" or set(c.modules) == usable)


# --------------------------------------------------------------------------------- putting together


def stage_parameters(job: Job, device: Device) -> tuple[Parameters, ...]:
    """The parameters of one rank of every stage."""
    with shard(job, [1] * len(job_kinds(job))) as built:
        return Counted(job, built, device).parameters_of_stages()


def longest_end_ms(
    job: Job,
    device: Device,
    efficiency: Efficiency,
    parameters: Sequence[Parameters],
    kinds: Sequence[LayerKind],
) -> float:
    """Time of the end of the step (`step_end`) of the stage that takes longest.

    parameters: of one rank of every stage; kinds: times of layers, behind which collectives run.
    """
    records = {index: kind.record(NONE) for kind in kinds for index in kind.layers}
    found = []
    for count, (layers, _, _) in zip(parameters, parts_of_stages(job), strict=True):
        own = [record for index in layers if (record := records[index]) is not None]
        forward_ms = sum(record.forward_ms for record in own)
        backward_ms = sum(record.backward_ms for record in own)
        found.append(step_end_ms(job, device, efficiency, count, forward_ms, backward_ms))
    return max(found)


def _kind(job: Job, kind: LayerKind, built: Shard, counted: Counted) -> LayerKind:
    """A kind of the shard as one of the whole model."""
    depth = len(built.kind_of)
    found: dict[int, JobKind] = {
        id(one): one for i, one in built.kind_of.items() if i in kind.layers
    }
    layers = [layer for one in found.values() for layer in one.layers]
    layers += [job.num_layers + index - depth for index in kind.layers if index >= depth]
    # MTP depths are built like the last layer.
    of_depth = min(layers) >= job.num_layers
    is_moe = bool(job.experts_of_depth) if of_depth else any(one.is_moe for one in found.values())
    return replace(
        kind,
        layers=tuple(sorted(layers)),
        imbalance=tuple(Imbalance(float(p), f) for p, f in job.moe_imbalance.items() if is_moe),
        static=counted.layer(min(layers)),
    )


def _modelled(job: Job, record: ChoiceRecord) -> ChoiceRecord:
    """The record marked as modelled, without spread and percentiles, because routing is even, and
    with the data loader's mask alive in its forward (`JobStep`)."""
    return replace(
        record,
        source="bytes: meta step; times: roofline",
        spread_ms=0.0,
        percentiles=(),
        forward_transient_bytes=record.forward_transient_bytes + job.attention_mask_bytes,
    )


def parallelism(job: Job) -> Parallelism:
    """The job's shapes, as a profile has them."""
    return Parallelism(
        micro_batch_size=job.micro_batch_size,
        seq_length=job.seq_length,
        tensor_parallel=job.size("tensor"),
        context_parallel=job.size("context"),
        expert_parallel=job.size("expert"),
        expert_tensor_parallel=job.expert_tensor_parallel,
        sequence_parallel=job.resolved.sequence_parallel,
    )


def _facts(job: Job, layer_facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_gpus": job.num_gpus,
        "data_parallel": job.data_parallel,
        "num_microbatches": job.num_microbatches,
        "hidden_size": job.resolved.hidden_size,
        "transformer_config": layer_facts,
        "job": asdict(job),
    }


def _fingerprint(job: Job, device: Device, efficiency: Efficiency) -> dict[str, str]:
    return {
        "made": "without a device",
        "job": hashlib.sha256(repr(job).encode()).hexdigest()[:12],
        "device": device.name,
        "efficiency": ", ".join(f"{n} {value:g}" for n, value in asdict(efficiency).items()),
        "megatron-core": metadata.version("megatron-core"),
        "torch": torch.__version__,
    }


def _weight_gradients(job: Job) -> str:
    if not job.fuses_weight_gradients:
        return "Every weight gradient exists in 16 bits until it is added to main_grad."
    kept = " and one dummy of each weight's shape is kept" * job.keeps_dummies("linear")
    engine = f"Transformer Engine {job.te_version}" if job.te_version else "no Transformer Engine"
    return (
        f"Weight gradients are added in the product (gradient_accumulation_fusion),{kept} "
        f"({engine}); cuBLAS keeps its workspaces."
    )


def stated(imbalance: dict[str, float]) -> str:
    """What a job says of uneven routing, as the end of a sentence about its records."""
    if not imbalance:
        return ""
    factors = ", ".join(f"x {factor:g} at percentile {at}" for at, factor in imbalance.items())
    return f", and plans multiply their bytes as stated ({factors})"


def _assumed_of_times(job: Job, device: Device, efficiency: Efficiency) -> tuple[str, ...]:
    said = []
    for name, value in asdict(efficiency).items():
        given = value != getattr(device.reaches, name)
        source = "given" if given else device.reached_by.get(name, "given")
        said.append(
            f"{name} {value:.0%} ({source})"
            if name in (*SHARES, "flash")
            else f"{name} {value:g} ({source})"
        )
    beside = [
        "collectives that Megatron and Transformer Engine start beside a product",
        *["userbuffers"] * job.resolved.tp_comm_overlap,
        *["the experts' all-to-all"] * job.resolved.overlap_moe_expert_parallel_comm,
        *["gradients but for the last bucket"] * job.overlap_grad_reduce,
        *["weights but for the first bucket"] * job.overlap_param_gather,
    ]
    return (
        f"Times are modelled: {device.name} ({device.source}) at {', '.join(said)}; "
        "meta/devices.json says what each is from.",
        f"Beside arithmetic run: {', '.join(beside)}.",
    )


def _assumed_of_dispatch(job: Job) -> str:
    if job.dispatcher == "allgather":
        return "tokens are gathered (allgather)"
    if job.dispatcher != "hybridep":
        return "the dispatcher is alltoall without DeepEP's buffers"
    room = job.resolved.moe_expert_rank_capacity_factor
    return "the dispatcher is HybridEP" + (f", room for {room:g} times that" if room else "")


def assumed(job: Job, device: Device, efficiency: Efficiency) -> tuple[str, ...]:
    """Every assumption behind the figures, one sentence each."""
    left_out = sorted(n for n, v in LEFT_OUT.items() if job.config.get(n) not in (None, v))
    left_out = [name for name in left_out if "cuda_graph" not in name]
    sentences = [
        "Nothing here is measured: bytes are those of a run on meta tensors, times a roofline.",
        *_assumed_of_times(job, device, efficiency),
        _weight_gradients(job),
        "Static bytes follow Megatron's rules for the distributed optimizer; buffers are not "
        "padded.",
    ]
    if job.transformer_impl == "transformer_engine":
        sentences.append(
            "Transformer Engine's modules, fused attention, rotary embedding, SwiGLU and the "
            "grouped products are stand-ins that save what docs/no-device.md states."
        )
    if job.precision != "bf16":
        sentences.append(
            f"{job.precision}: inputs of linear layers are kept quantised, attention is in bf16; "
            "quantising takes one pass over the input."
        )
    if job.resolved.num_moe_experts:
        sentences.append(
            "MoE: in the records every expert gets equally many tokens"
            + stated(job.moe_imbalance)
            + f"; {_assumed_of_dispatch(job)}."
        )
    if job.graphs.implementation != "none":
        sentences.append("CUDA graphs count as docs/estimate-model.md states.")
    if job.lora_rank:
        targets = ", ".join(job.lora_target_modules)
        sentences.append(f"LoRA of rank {job.lora_rank} on {targets}; everything else is frozen.")
    if left_out:
        sentences.append(f"Left out of the config: {', '.join(left_out)}.")
    return tuple(sentences)
