"""Makes a profile on one device: real kernels of the job's shapes, measured as in a job; static
bytes and the time of collectives come from the same job on meta tensors.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.errors import MachineError, ProfileError
from megatron_autorecompute.meta.devices import Device, Efficiency
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.meta_step import in_processes_beside, kept_between_steps
from megatron_autorecompute.meta.model import JobStep, Shard
from megatron_autorecompute.meta.profiling import (
    Progress,
    every_choice,
    longest_end_ms,
    nothing,
    profile_job,
    shown,
    stage_parameters,
    stated,
    static_tensors,
    with_inert,
)
from megatron_autorecompute.meta.roofline import Communication
from megatron_autorecompute.meta.static_bytes import Parameters
from megatron_autorecompute.one_device import build
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import (
    MEASURED_ON_ONE_DEVICE,
    ChoiceRecord,
    LayerKind,
    Profile,
)
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.fingerprint import kernels
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.measurement import Measurement
from megatron_autorecompute.runtime.model_shard import ModelShard, alone
from megatron_autorecompute.runtime.probe import CudaBytes, Memory
from megatron_autorecompute.runtime.samples import SAMPLES, TURNS
from megatron_autorecompute.runtime.step_memory import is_out_of_memory

STEPS = 160
"""A model of one layer of every kind needs a step for every choice and repeat, and one for each of
its turns; one takes some 0.1 s to 0.2 s on a GPU. Choices of several modules take none: what they
take is added up from their modules (`runtime.samples.of_parts`)."""


def profile_on_device(
    job: Job,
    device: torch.device,
    gpu: Device,
    efficiency: Efficiency | None = None,
    repeats: int | None = None,
    progress: Progress = lambda _: None,
) -> Profile:
    """Measure every choice of every kind of layer of a job on one device.

    Args:
        job: the training job.
        device: where its layers run.
        gpu: the job's GPU, for the rates of links, and for workspaces among static bytes.
        efficiency: what is assumed of the GPU; by default its own. Only links and network are used.
        repeats: how often each choice is timed, at least; by default `default_repeats`.
        progress: called with a sentence before each step.

    Raises:
        OptionError, PipelineError: the job cannot be read or built.
        MachineError: this machine lacks what the job needs, such as memory.
    """
    build.refuse(job, device)
    efficiency = efficiency or gpu.reaches
    run = functools.partial(modelled, job, gpu, efficiency)
    if device.type == "cuda":  # a processor's times would suffer from work beside
        with in_processes_beside(run, [0]) as [future]:
            measured = measure(job, device, repeats, progress)
            progress(f"{job.name}: static bytes and communication, on meta tensors")
            beside, parameters = future.result()
    else:
        progress(f"{job.name}: static bytes and communication, on meta tensors")
        beside, parameters = run(0)
        measured = measure(job, device, repeats, progress)
    kinds = with_inert([_kind(kind, beside) for kind in measured.kinds])
    facts = {**beside.model.facts, "measured": True}
    return replace(
        beside,
        model=replace(beside.model, facts=facts),
        kinds=kinds,
        embedding=_together(measured.embedding, beside.embedding),
        head=_together(measured.head, beside.head),
        final_norm=measured.final_norm
        and beside.final_norm
        and _together(measured.final_norm, beside.final_norm),
        boundary_bytes=measured.boundary_bytes,
        step_end_ms=longest_end_ms(job, gpu, efficiency, parameters, kinds),
        fingerprint={
            **beside.fingerprint,
            "made": "on one device",
            "device": device_name(device),
            "links": gpu.name,
            **kernels(),
        },
        assumptions=assumed(job, device, gpu, efficiency, least_runs(kinds)),
    )


def modelled(
    job: Job, gpu: Device, efficiency: Efficiency, _: int
) -> tuple[Profile, tuple[Parameters, ...]]:
    """Static bytes of the job, and as times those of communication alone; every stage's numbers of
    parameters."""
    profile = profile_job(job, gpu, efficiency, clock_type=Communication)
    return profile, stage_parameters(job, gpu)


def device_name(device: torch.device) -> str:
    """The device's name as in the fingerprint of a profile that a job measured."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# ---------------------------------------------------------------------------------- measuring


def measure(job: Job, device: torch.device, repeats: int | None, progress: Progress) -> Profile:
    """The profile of a model of one layer of each kind, as measured; times without communication
    but for what the fake process group copies on this device.

    MTP depths run behind the decoder's layers, which hold and take the same with them as without.
    """
    progress(f"{job.name}: building one layer of every kind on {device_name(device)}")
    with _short_of_memory(job, "building the layers"), build.shard(job, device) as built:
        profile = _measured(job, built, device, repeats, progress)
        del built
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return profile


def _measured(
    job: Job,
    built: Shard,
    device: torch.device,
    repeats: int | None,
    progress: Progress,
) -> Profile:
    step, model = JobStep(job, device), built.model
    static, gradients = static_tensors(job, model, step, dummies=job.fuses_weight_gradients)
    on_cuda = device.type == "cuda"

    def run() -> None:
        loss: Any = step(None, model)[0].float().mean()
        loss.backward()

    with apply(nothing(job, built), model, groups=()) as applied:
        whole = ModelShard([model], all_gather=alone, choices_of=every_choice)
        measurement = Measurement(whole, applied, timed=_alone)
        repeats = repeats or default_repeats(
            max(sum(map(_alone, kind.choices)) for kind in whole.kinds)
        )

        def watched(what: str, number: int, watching: AbstractContextManager[None]) -> None:
            progress(f"{job.name}: {what}, step {number + 1}")
            with _short_of_memory(job, applied.policy.format()), watching:
                run()
            for gradient in gradients:
                gradient.zero_()

        def bytes_read(memory: Memory) -> None:
            for number, _ in enumerate(measurement.policies()):
                watched("bytes", number, measurement.watch(memory, times=False))

        with _short_of_memory(job, "none"):
            run()
        if on_cuda:
            # Code is compiled or tuned, buffers are made. Sets of modules run nothing else.
            for _ in measurement.policies(wanted=_alone):
                with _short_of_memory(job, applied.policy.format()):
                    run()
            torch.cuda.empty_cache()
            bytes_read(CudaBytes())
        else:
            with LiveBytes(static) as live, kept_between_steps([model], live):
                run()  # what a MoE layer's dispatcher keeps until the next forward is there before
                bytes_read(live)
        for number, timed in enumerate(measurement.turns(microbatches=1, samples=repeats)):
            watched("times", number, measurement.watch(None, times=timed))
        return shown(job, built, measurement)


def default_repeats(choices: int) -> int:
    """Repeats for a model whose layers have at most so many choices that are timed."""
    return max(TURNS, min(SAMPLES, STEPS // choices - TURNS))


def _alone(choice: LayerPolicy) -> bool:
    """Whether a choice is no set of several modules."""
    return len(choice.modules) < 2


@contextmanager
def _short_of_memory(job: Job, doing: str) -> Iterator[None]:
    """Raise MachineError where the device's memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        on_cpu = "DefaultCPUAllocator" in str(error)
        if not (isinstance(error, MemoryError) or on_cpu or is_out_of_memory(error)):
            raise
        raise MachineError(
            f"{job.name}: this device ran out of memory at {doing}, with one layer of every kind, "
            "embedding and head on it. Measure where it has more memory and nobody else uses it, "
            f"or a job with micro_batch_size below {job.micro_batch_size}, a shorter seq_length, "
            "or more tensor or expert parallel ranks; estimate needs no device."
        ) from error


# --------------------------------------------------------------------------------- putting together


def _kind(measured: LayerKind, modelled: Profile) -> LayerKind:
    """A kind of the whole model, with what was measured on one layer of it."""
    kind = next((kind for kind in modelled.kinds if kind.name == measured.name), None)
    records = []
    for record in measured.choices:
        beside = None if kind is None else kind.record(record.choice)
        if beside is None:
            raise ProfileError(
                f"{modelled.model.name}: {record.choice} of {measured.name} was measured, and its "
                "communication is not known: without a device Megatron has no such choice or kind "
                "here. Report the config."
            )
        records.append(_together(record, beside))
    return replace(kind or measured, choices=tuple(records), inert=measured.inert)


def _together(measured: ChoiceRecord, modelled: ChoiceRecord) -> ChoiceRecord:
    """The measured record, and the modelled time of its collectives on top."""
    communication = modelled.forward_ms + modelled.backward_ms
    return replace(
        measured,
        forward_ms=measured.forward_ms + modelled.forward_ms,
        backward_ms=measured.backward_ms + modelled.backward_ms,
        communication_ms=communication,
        percentiles=(),
        source=MEASURED_ON_ONE_DEVICE,
    )


def least_runs(kinds: Sequence[LayerKind]) -> int:
    """How many runs the times of the least measured choice are the lower quartile of."""
    return min(record.runs for kind in kinds for record in kind.choices)


def assumed(
    job: Job, device: torch.device, gpu: Device, efficiency: Efficiency, runs: int
) -> tuple[str, ...]:
    """What of the figures was measured and what modelled, one sentence each."""
    sentences = [
        f"Measured on one {device_name(device)}: held and transient bytes, and the time of "
        "arithmetic, of one layer of every kind, embedding and head; times are the lower "
        f"quartiles of at least {runs} runs, in turns; those of a set of modules are added up from "
        "what each of its modules adds to none.",
        f"Modelled: communication, which moved no data here, by {gpu.name}'s links ({gpu.source}) "
        f"at {efficiency.link:.0%} of their peaks, {efficiency.network:.0%} between nodes; what "
        f"runs beside arithmetic in a job is hidden as far as arithmetic lasts by the roofline.",
        "Static bytes follow Megatron's rules for the distributed optimizer, as estimate counts "
        "them; buffers are not padded. The end of the step is modelled, behind the layers as "
        "measured.",
    ]
    if device.type == "cuda":
        sentences.append(
            "Bytes are those of torch's allocator, whose blocks are larger than their tensors. "
            "The device waits before each timed forward and backward, so that the host is ahead; "
            "what the host takes is recorded beside."
        )
    else:
        sentences.append(
            "Bytes are those of live tensors. Times are a processor's, and say nothing of a GPU."
        )
    if job.resolved.num_moe_experts:
        sentences.append(
            "MoE: routing is forced, every expert gets equally many tokens"
            + stated(job.moe_imbalance)
            + "; the dispatcher is alltoall."
        )
    if job.fuses_weight_gradients and not build.adds_in_the_product(job):
        sentences.append(
            "Weight gradients of Megatron's own linear layers, such as the output layer, were not "
            "added in the product (gradient_accumulation_fusion), because Apex is not installed "
            "here: their bytes count among transients, and their time includes one addition."
        )
    unfused = job.transformer_impl == "local" and not build.has_fused_softmax()
    if unfused and job.resolved.masked_softmax_fusion:
        sentences.append(
            "Masking and softmax were several kernels, with a mask of their own, because those of "
            "masked_softmax_fusion are not installed here."
        )
    if job.precision != "bf16":
        sentences.append(f"{job.precision}: weights are in bf16, products in {job.precision}.")
    names = build.left_out(job)
    if left := sorted(n for n, v in names.items() if job.config.get(n) not in (None, v)):
        sentences.append(f"Left out of the config: {', '.join(left)}.")
    return tuple(sentences)
