"""How fast a plan trains, as far as its profile's facts say: tokens/s, TFLOP/s per GPU, MFU.

A model's floating-point operations are counted as Megatron counts them for its logged throughput:
the formulas are those of `transformer_flops` and `hybrid_flops` in `num_floating_point_operations`
of `megatron/training/training.py`. Matrix products only, forward and twice as much in the backward,
causal attention at half the square, no recompute. Of a hybrid model Megatron counts an MTP depth's
layers and logits, and not its norms and projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import device
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


def throughput_words(plan: Plan) -> str:
    """One sentence: the bubble, and what the profile's facts allow of tokens/s, TFLOP/s and MFU."""
    cost, profile, shape = plan.cost, plan.profile, plan.profile.parallelism
    if not cost.step_ms:
        return "Bubble 0.0% of the step."
    words = [f"Bubble {cost.bubble_ms / cost.step_ms:.1%} of the step"]
    replica_gpus = shape.tensor_parallel * shape.context_parallel * plan.layout.num_stages
    tokens = shape.micro_batch_size * plan.schedule.num_microbatches * shape.seq_length
    tokens_per_s = tokens / (cost.step_ms / 1000) / replica_gpus  # of one GPU
    if profile.num_gpus is None or profile.num_gpus % replica_gpus:
        words.append(f"{tokens_per_s:,.0f} tokens/s per GPU")
    else:
        every = tokens_per_s * profile.num_gpus
        words.append(f"{every:,.0f} tokens/s on {profile.num_gpus:,} GPUs")
    if not profile.model.encoder_layers:
        # No job, one that another version described, or a config written by hand.
        with suppress(KeyError, OptionError, TypeError, ValueError):
            config, vocab_size, precision = _model(profile)
            flops = flops_per_token(config, shape.seq_length, vocab_size) * tokens_per_s
            words.append(f"{flops / 1e12:,.0f} TFLOP/s per GPU")
            with suppress(OptionError):  # of no device in the table
                peak = device(profile.fingerprint.get("device", "")).flops[precision]
                said = f"{peak / 1e12:,.0f} {precision} TFLOP/s"
                words.append(f"MFU {flops / peak:.1%} (of {said})")
    return f"{', '.join(words)}{_modelled(profile)}."


def _modelled(profile: Profile) -> str:
    """What of the times is modelled, as the end of a sentence."""
    sources = {record.source for kind in profile.kinds for record in kind.choices}
    if MEASURED_ON_ONE_DEVICE in sources:
        return "; communication is modelled"
    return "" if MEASURED in sources else "; times are modelled"


def _model(profile: Profile) -> tuple[Mapping[str, Any], int, str]:
    """The config that a profile records, rows of the output layer, and the precision of matrix
    products. Raises KeyError for a profile without one, and for frozen weights."""
    facts = profile.model.facts
    if facts.get("job") is not None:
        job = job_from(facts["job"], "model.facts.job")
        if job.lora_rank:
            raise KeyError("lora_rank")
        precision = next((one for one in ("fp8", "fp4") if one in job.precision), "bf16")
        return job.config, job.padded_vocab_size, precision
    pattern = facts.get("hybrid_layer_pattern")
    config = {"num_layers": profile.model.num_layers, **facts["transformer_config"]}
    precision = next((one for one in ("fp4", "fp8") if config.get(one)), "bf16")
    return config | {"hybrid_layer_pattern": pattern}, facts["vocab_size"], precision


def flops_per_token(config: Mapping[str, Any], seq_length: int, padded_vocab_size: int) -> float:
    """Operations that training on one token takes.

    Args:
        config: fields of Megatron's TransformerConfig by their names; missing ones have Megatron's
            defaults.
        seq_length: tokens of a sample.
        padded_vocab_size: rows of the output layer over all ranks.

    Raises KeyError for a config without num_layers, hidden_size or num_attention_heads, or with
    layers that are not counted: `OTHER_LAYERS`, and `G`, `D` and `+` of a hybrid pattern.
    """
    pattern, hidden = config.get("hybrid_layer_pattern"), config["hidden_size"]
    others = OTHER_LAYERS if pattern is None else OTHER_LAYERS[1:]
    if other := [name for name in others if config.get(name)]:
        raise KeyError(*other)
    if pattern is not None:
        parsed = HybridPattern.parse(pattern)
        depths, beside = parsed.mtp_num_layers, 0
        symbols = parsed.symbols + parsed.depth * depths
        config = {**config, "attention_output_gate": False}
    elif config.get("is_hybrid_model"):
        raise KeyError("hybrid_layer_pattern")
    else:
        depths = config.get("mtp_num_layers") or 0
        beside = depths * (3 * hidden + 2 * hidden * hidden)  # norms and projection of a depth
        symbols = _symbols(config, depths)
    counts = Counter(symbols)
    products = sum(counts[one] * PRODUCTS[one](config, seq_length) for one in sorted(counts))
    products += beside + (depths + 1) * hidden * padded_vocab_size
    return float(FORWARD_AND_BACKWARD * MULTIPLY_ADD * products)


def _symbols(config: Mapping[str, Any], depths: int) -> str:
    """A GPT's layers as a hybrid pattern has them; depths are like the last layer."""
    number: int = config["num_layers"]
    frequency = config.get("moe_layer_freq", 1)
    if not config.get("num_moe_experts"):
        has_experts = [False] * number
    elif isinstance(frequency, int):
        has_experts = [index % frequency == 0 for index in range(number)]
    else:
        has_experts = list(map(bool, frequency))
    has_experts += has_experts[-1:] * depths
    return "*" * (number + depths) + "".join("E" if one else "-" for one in has_experts)


def _mamba(config: Mapping[str, Any], seq_length: int) -> float:
    """Products per token of a Mamba layer; of the scan 3.5, as Megatron rounds. Megatron takes the
    inner width for twice the hidden size, whatever the heads are."""
    hidden, state = config["hidden_size"], config.get("mamba_state_dim", 128)
    inner, groups = 2 * hidden, config.get("mamba_num_groups", 8)
    heads = config.get("mamba_num_heads") or inner // config.get("mamba_head_dim", 64)
    projections = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return float(projections + 3.5 * inner * state)


def _attention(config: Mapping[str, Any], seq_length: int) -> float:
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


def _mlp(config: Mapping[str, Any], seq_length: int) -> float:
    hidden = config["hidden_size"]
    return float(_matrices(config) * hidden * (config.get("ffn_hidden_size") or 4 * hidden))


def _experts(config: Mapping[str, Any], seq_length: int) -> float:
    hidden = config["hidden_size"]
    width = config.get("moe_ffn_hidden_size") or config.get("ffn_hidden_size") or 4 * hidden
    shared = config.get("moe_shared_expert_intermediate_size") or 0
    latent = config.get("moe_latent_size")
    chosen = _matrices(config) * width * config.get("moe_router_topk", 2)
    routed = chosen * (latent or hidden) + 2 * hidden * (latent or 0)
    return float(routed + _matrices(config) * hidden * shared)


def _matrices(config: Mapping[str, Any]) -> int:
    return 3 if config.get("gated_linear_unit") else 2


PRODUCTS: Mapping[str, Callable[[Mapping[str, Any], int], float]] = {
    "*": _attention,
    "-": _mlp,
    "E": _experts,
    "M": _mamba,
}
"""Products per token of a layer, by its symbol in a hybrid pattern."""
