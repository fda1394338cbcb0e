"""How fast a plan trains, as far as its profile's facts say: tokens/s, TFLOP/s per GPU, MFU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_autorecompute.cli.model_flops import flops_per_token
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Device, device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import MEASURED, MEASURED_ON_ONE_DEVICE, Profile


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast one step of a plan is. A figure is None where the profile lacks facts for it."""

    tokens_per_s: float
    """Tokens that one GPU trains in a second."""
    num_gpus: int | None
    """GPUs of the whole job. None also where replicas do not divide their number."""
    flops_per_s: float | None
    """Operations of the model that one GPU does in a second, without recompute."""
    peak_flops: float | None
    """The device's peak at the model's precision, in operations a second."""
    precision: str
    """Precision of the model's matrix products: bf16, fp8 or fp4."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, from 0 to 1."""
        if self.flops_per_s is None or self.peak_flops is None:
            return None
        return self.flops_per_s / self.peak_flops


@dataclass(frozen=True, slots=True)
class _Model:
    config: Mapping[str, Any]
    padded_vocab_size: int
    precision: str


def throughput(plan: Plan) -> Throughput | None:
    """What the plan's step time says of its speed; None if the step takes no time."""
    shape, stages = plan.profile.parallelism, plan.layout.num_stages
    step_s = plan.cost.step_ms / 1000
    if not step_s:
        return None
    replica_gpus = shape.tensor_parallel * shape.context_parallel * stages
    tokens = shape.micro_batch_size * plan.schedule.num_microbatches * shape.seq_length
    tokens_per_s = tokens / step_s / replica_gpus
    model = _model(plan.profile)
    flops = None
    if model is not None and not plan.profile.model.encoder_layers:
        with suppress(KeyError, TypeError, ValueError):  # a config written by hand
            counted = flops_per_token(model.config, shape.seq_length, model.padded_vocab_size)
            flops = counted * tokens_per_s
    num_gpus = plan.profile.num_gpus
    gpu, precision = _device(plan.profile), model.precision if model else "bf16"
    return Throughput(
        tokens_per_s,
        None if num_gpus is None or num_gpus % replica_gpus else num_gpus,
        flops,
        gpu.flops.get(precision) if gpu else None,
        precision,
    )


def throughput_words(plan: Plan) -> str:
    """One sentence: the bubble, and what the profile's facts allow."""
    cost = plan.cost
    share = cost.bubble_ms / cost.step_ms if cost.step_ms else 0.0
    words = [f"Bubble {share:.1%} of the step"]
    found = throughput(plan)
    if found is None:
        return f"{words[0]}."
    if found.num_gpus is None:
        words.append(f"{found.tokens_per_s:,.0f} tokens/s per GPU")
    else:
        every = found.tokens_per_s * found.num_gpus
        words.append(f"{every:,.0f} tokens/s on {found.num_gpus:,} GPUs")
    if found.flops_per_s is not None:
        words.append(f"{found.flops_per_s / 1e12:,.0f} TFLOP/s per GPU")
    if found.mfu is not None and found.peak_flops is not None:
        peak = f"{found.peak_flops / 1e12:,.0f} {found.precision}"
        words.append(f"MFU {found.mfu:.1%} (of {peak} TFLOP/s)")
    return f"{', '.join(words)}{_modelled(plan.profile)}."


def _modelled(profile: Profile) -> str:
    """What of the times is modelled, as the end of a sentence."""
    sources = {record.source for kind in profile.kinds for record in kind.choices}
    if MEASURED_ON_ONE_DEVICE in sources:
        return "; communication is modelled"
    return "" if MEASURED in sources else "; times are modelled"


def _model(profile: Profile) -> _Model | None:
    """The config that a profile records; None for one without, and for frozen weights."""
    facts = profile.model.facts
    config = facts.get("transformer_config")
    if facts.get("job") is None:
        vocab = facts.get("vocab_size")
        if not isinstance(config, dict) or not isinstance(vocab, int):
            return None
        pattern = facts.get("hybrid_layer_pattern")
        whole = {"num_layers": profile.model.num_layers, **config, "hybrid_layer_pattern": pattern}
        return _Model(whole, vocab, _precision(config))
    try:
        job = job_from(facts["job"], "model.facts.job")
    except OptionError:  # which another version described
        return None
    if job.lora_rank:
        return None
    return _Model(job.config, job.padded_vocab_size, _shortened(job.precision))


def _precision(config: Mapping[str, Any]) -> str:
    if config.get("fp4"):
        return "fp4"
    return "fp8" if config.get("fp8") else "bf16"


def _shortened(precision: str) -> str:
    """The devices' name of a job's precision."""
    return next((name for name in ("fp8", "fp4") if name in precision), "bf16")


def _device(profile: Profile) -> Device | None:
    with suppress(OptionError):
        return device(profile.fingerprint.get("device", ""))
    return None
