"""How fast a plan trains, as far as its profile's facts say: tokens/s, TFLOP/s per GPU, MFU.

A model's floating-point operations are counted as Megatron counts them for its logged throughput:
the formulas are those of `transformer_flops` and `hybrid_flops` in `num_floating_point_operations`
of `megatron/training/training.py`. Matrix products only, forward and twice as much in the backward,
causal attention at half the square, no recompute. Of a hybrid model Megatron counts an MTP depth's
layers and logits, and not its norms and projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Device, device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import MEASURED, MEASURED_ON_ONE_DEVICE, Profile

FORWARD_AND_BACKWARD = 3
"""Every matrix product is run once in the forward and twice in the backward."""
MULTIPLY_ADD = 2
"""Operations per pair of factors."""
OTHER_LAYERS = (
    "experimental_attention_variant",
    "hybrid_override_pattern",
    "heterogeneous_block_specs",
)
"""Fields of a config whose layers are not counted here."""


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


def flops_per_token(config: Mapping[str, Any], seq_length: int, padded_vocab_size: int) -> float:
    """Operations that training on one token takes.

    Args:
        config: fields of Megatron's TransformerConfig by their names; missing ones have Megatron's
            defaults.
        seq_length: tokens of a sample.
        padded_vocab_size: rows of the output layer over all ranks.

    Raises KeyError for a config without num_layers, hidden_size or num_attention_heads, or with
    layers that are not counted: `OTHER_LAYERS`, and `D` and `+` of a hybrid pattern.
    """
    pattern = config.get("hybrid_layer_pattern")
    others = OTHER_LAYERS if pattern is None else OTHER_LAYERS[1:]
    if other := [name for name in others if config.get(name)]:
        raise KeyError(*other)
    if pattern is not None:
        return _hybrid(config, HybridPattern.parse(pattern), seq_length, padded_vocab_size)
    if config.get("is_hybrid_model"):
        raise KeyError("hybrid_layer_pattern")
    hidden, depths = config["hidden_size"], config.get("mtp_num_layers") or 0
    layers = config["num_layers"] + depths
    products = (
        layers * _attention(config, seq_length)
        + _mlps(config, depths)
        + depths * (3 * hidden + 2 * hidden * hidden)  # norms and projection of a depth
        + (depths + 1) * hidden * padded_vocab_size
    )
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * float(products)


def _hybrid(
    config: Mapping[str, Any], pattern: HybridPattern, seq_length: int, padded_vocab_size: int
) -> float:
    symbols = pattern.symbols + pattern.depth * pattern.mtp_num_layers
    if other := set(symbols) & set("D+"):
        raise KeyError(*other)
    hidden, width = config["hidden_size"], config.get("ffn_hidden_size")
    matrices = 3 if config.get("gated_linear_unit") else 2
    of_symbol: dict[str, Callable[[], float]] = {
        "*": lambda: _attention({**config, "attention_output_gate": False}, seq_length),
        "-": lambda: float(matrices * hidden * (width or 4 * hidden)),
        "E": lambda: _experts(config),
        "M": lambda: _mamba(config),
        "G": lambda: _gated_delta_net(config),
    }
    products = sum(of_symbol[one]() * symbols.count(one) for one in sorted(set(symbols)))
    products += (pattern.mtp_num_layers + 1) * hidden * padded_vocab_size
    return float(FORWARD_AND_BACKWARD * MULTIPLY_ADD * products)


def _mamba(config: Mapping[str, Any]) -> float:
    """Products per token of a Mamba layer; of the scan 3.5, as Megatron rounds. Megatron takes the
    inner width for twice the hidden size, whatever the heads are."""
    hidden, state = config["hidden_size"], config.get("mamba_state_dim", 128)
    inner, groups = 2 * hidden, config.get("mamba_num_groups", 8)
    heads = config.get("mamba_num_heads") or inner // config.get("mamba_head_dim", 64)
    projections = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return float(projections + 3.5 * inner * state)


def _gated_delta_net(config: Mapping[str, Any]) -> float:
    """Products per token of a Gated DeltaNet layer."""
    hidden, value_width = config["hidden_size"], config["linear_value_head_dim"]
    keys = config["linear_key_head_dim"] * config["linear_num_key_heads"]
    heads = config["linear_num_value_heads"]
    values = value_width * heads
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + hidden * values
    convolution = config["linear_conv_kernel_dim"] * (2 * keys + values)
    return float(projections + convolution + 4 * heads * value_width**2)


def _attention(config: Mapping[str, Any], seq_length: int) -> float:
    """Products per token of one layer's attention, projections included."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("multi_latent_attention"):
        return _latent_attention(config, seq_length)
    channels = config.get("kv_channels") or hidden // heads
    query = channels * heads
    groups = config.get("num_query_groups") or heads
    gate = query if config.get("attention_output_gate") else 0
    projections = hidden * (query + 2 * channels * groups + gate) + query * hidden
    return float(projections + query * seq_length)  # half of the square, twice


def _latent_attention(config: Mapping[str, Any], seq_length: int) -> float:
    """Products per token of multi-latent attention; defaults are MLATransformerConfig's."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rotary = config.get("qk_pos_emb_head_dim", 64)
    plain, value = config.get("qk_head_dim", 128), config.get("v_head_dim", 128)
    query_rank, rank = config.get("q_lora_rank", 512), config.get("kv_lora_rank", 512)
    queries = heads * (plain + rotary)
    query = hidden * queries if query_rank is None else query_rank * (hidden + queries + 1)
    keys_and_values = rank * (hidden + heads * (plain + value) + 1) + hidden * rotary
    projections = query + keys_and_values + heads * value * hidden
    return float(projections + seq_length * (queries + heads * value) / 2)


def _mlps(config: Mapping[str, Any], depths: int) -> float:
    """Products per token of all MLPs and experts; depths are like the last layer."""
    hidden = config["hidden_size"]
    width = config.get("ffn_hidden_size") or 4 * hidden
    matrices = 3 if config.get("gated_linear_unit") else 2
    pattern = _moe_pattern(config)
    pattern += pattern[-1:] * depths
    experts = sum(pattern)
    own = matrices * hidden * width * (len(pattern) - experts)
    return float(own + (experts * _experts(config) if experts else 0))


def _experts(config: Mapping[str, Any]) -> float:
    """Products per token of one layer's experts."""
    hidden = config["hidden_size"]
    width = config.get("ffn_hidden_size") or 4 * hidden
    matrices = 3 if config.get("gated_linear_unit") else 2
    expert_width = (config.get("moe_ffn_hidden_size") or width) * config.get("moe_router_topk", 2)
    shared = config.get("moe_shared_expert_intermediate_size") or 0
    latent = config.get("moe_latent_size")
    routed = matrices * expert_width * (latent or hidden) + 2 * hidden * (latent or 0)
    return float(routed + matrices * hidden * shared)


def _moe_pattern(config: Mapping[str, Any]) -> list[bool]:
    number, frequency = config["num_layers"], config.get("moe_layer_freq", 1)
    if not config.get("num_moe_experts"):
        return [False] * number
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(number)]
    return list(map(bool, frequency))
