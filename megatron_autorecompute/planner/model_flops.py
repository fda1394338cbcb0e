"""The floating-point operations of a model, as Megatron counts them for its logged throughput.

The formula is that of `transformer_flops` in `num_floating_point_operations` of
`megatron/training/training.py`: matrix products only, forward and twice as much in the backward,
causal attention at half the square, no recompute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORWARD_AND_BACKWARD = 3
"""Every matrix product is run once in the forward and twice in the backward."""
MULTIPLY_ADD = 2
"""Operations per pair of factors."""
OTHER_LAYERS = (
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "is_hybrid_model",
    "heterogeneous_block_specs",
)
"""Fields of a config whose layers are not counted here."""


def flops_per_token(config: Mapping[str, Any], seq_length: int, padded_vocab_size: int) -> float:
    """Operations that training on one token takes.

    Args:
        config: fields of Megatron's TransformerConfig by their names; missing ones have Megatron's
            defaults.
        seq_length: tokens of a sample.
        padded_vocab_size: rows of the output layer over all ranks.

    Raises KeyError for a config without num_layers, hidden_size or num_attention_heads, or with
    layers that are not counted (`OTHER_LAYERS`).
    """
    if other := [name for name in OTHER_LAYERS if config.get(name)]:
        raise KeyError(*other)
    hidden, depths = config["hidden_size"], config.get("mtp_num_layers") or 0
    layers = config["num_layers"] + depths
    products = (
        layers * _attention(config, seq_length)
        + _mlps(config, depths)
        + depths * (3 * hidden + 2 * hidden * hidden)  # norms and projection of a depth
        + (depths + 1) * hidden * padded_vocab_size
    )
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * float(products)


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
    """The same of multi-latent attention; defaults are MLATransformerConfig's."""
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
    if not experts:
        return float(own)
    expert_width = (config.get("moe_ffn_hidden_size") or width) * config.get("moe_router_topk", 2)
    shared = config.get("moe_shared_expert_intermediate_size") or 0
    latent = config.get("moe_latent_size")
    routed = matrices * expert_width * (latent or hidden) + 2 * hidden * (latent or 0)
    return float(own + experts * (routed + matrices * hidden * shared))


def _moe_pattern(config: Mapping[str, Any]) -> list[bool]:
    number, frequency = config["num_layers"], config.get("moe_layer_freq", 1)
    if not config.get("num_moe_experts"):
        return [False] * number
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(number)]
    return list(map(bool, frequency))
