"""A job's config as values, and what of it runs as CUDA graphs: what is not given has Megatron's
default. What is given has the type and the limits of its field here.

Megatron has renamed the fields of graphs. Up to 0.18 there is `cuda_graph_scope`, and
`full_iteration` is one of its values. Later there is `cuda_graph_modules`, and full_iteration is a
`cuda_graph_impl`. This module reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_autorecompute.profile import MOST_LAYERS

MOST_RANKS = 1 << 20
MOST_WIDTH = 1 << 24
"""The most elements of a hidden state; more than any model has."""
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Layers = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Experts = Annotated[int, Field(ge=1, le=1 << 12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Fields of Megatron's TransformerConfig by its names, and its defaults; others say why."""

    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden_size: Width
    num_attention_heads: Width
    num_query_groups: Width | None = None
    kv_channels: Width | None = None
    ffn_hidden_size: Width | None = None
    activation_func: Literal["gelu", "silu", "relu", "squared_relu", "quick_gelu", "fast_gelu"] = (
        "gelu"
    )
    """A function of torch.nn.functional or of Megatron by its name."""
    add_bias_linear: bool = True
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    gated_linear_unit: bool = False
    multi_latent_attention: bool = False
    """TransformerConfig's; MLATransformerConfig has True."""
    attention_dropout: float = 0.1
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    """The backend by its name."""
    window_size: Any = None
    window_attn_skip_freq: Any = None
    linear_attention_freq: Any = None
    mtp_num_layers: Annotated[int, Field(ge=0, le=64)] = 0
    """The number of depths, where Megatron has None for 0."""
    hybrid_layer_pattern: str | None = None
    """An argument of HybridModel, and in a job's config with the others."""

    num_moe_experts: Annotated[int, Field(ge=0, le=1 << 12)] = 0
    """The number of experts, where Megatron has None for 0."""
    moe_layer_freq: Any = 1
    moe_ffn_hidden_size: Width | None = None
    moe_shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=MOST_WIDTH)] = 0
    """The size of shared experts, where Megatron has None for 0."""
    moe_router_topk: Experts = 2
    moe_router_dtype: str | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_token_dispatcher_type: str = "alltoall"
    """Megatron's default is allgather. A profile's assumptions say which one was taken."""
    moe_flex_dispatcher_backend: str = "deepep"
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None
    moe_expert_rank_capacity_factor: Annotated[float, Field(ge=1)] | None = None
    moe_paged_stash: bool = False
    moe_paged_stash_buffer_size_factor_cuda: float = 1.1
    moe_use_grouped_tensor: bool = False
    overlap_moe_expert_parallel_comm: bool = False

    tensor_model_parallel_size: Ranks = 1
    context_parallel_size: Ranks = 1
    pipeline_model_parallel_size: Ranks = 1
    expert_model_parallel_size: Ranks = 1
    expert_tensor_parallel_size: Ranks | None = None
    sequence_parallel: bool = False
    cp_comm_type: Any = None
    hierarchical_context_parallel_sizes: list[int] | None = None
    virtual_pipeline_model_parallel_size: Ranks | None = None
    microbatch_group_size_per_vp_stage: Ranks | None = None
    num_layers_in_first_pipeline_stage: Layers | None = None
    num_layers_in_last_pipeline_stage: Layers | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: Any = None
    tp_comm_overlap: bool = False
    overlap_p2p_comm: bool = True
    """Megatron-LM sets it where chunks interleave, the one case in which it counts."""
    deallocate_pipeline_outputs: bool = True
    """Megatron-LM sets it."""

    fp16: bool = False
    fp8_recipe: str | None = None
    """Megatron Bridge's default is scales of the current tensor, TransformerConfig's delayed ones;
    None: current."""
    fp8_output_proj: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    deterministic_mode: bool = False
    use_transformer_engine_op_fuser: bool = False
    gradient_accumulation_fusion: bool = True
    """Megatron-LM sets it."""
    masked_softmax_fusion: bool = True
    """Megatron-LM sets it."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Resolved:
        """The settings of the fields that a job gives."""
        named = {field.name for field in fields(cls)}
        return cls(**{n: v for n, v in config.items() if n in named and v is not None})


IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
"""The values of `cuda_graph_impl`."""
ITERATION = "full_iteration"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Parts of a layer that can be captured; none of them stands for whole layers."""
FIELDS = ("cuda_graph_modules", "cuda_graph_scope")
SAMPLE_BYTES = 8 + 8 + 4 + 8
"""The bytes of a token as the data loader gives it: token, label, loss mask, position
(Megatron-core datasets/gpt_dataset.py)."""


@dataclass(frozen=True, slots=True)
class GraphScope:
    """What of a job its CUDA graphs capture."""

    implementation: str = "none"
    """One of `IMPLEMENTATIONS`."""
    modules: tuple[str, ...] = ()
    """The captured modules of each layer; empty: all of it. Nothing with `full_iteration`."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GraphScope:
        """The scope by fields of Megatron's TransformerConfig, as `check_config` accepts them."""
        old = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
        impl = next((name for field, name in old.items() if config.get(field)), "none")
        impl = config.get("cuda_graph_impl") or impl
        names = [name for field in FIELDS for name in names_of(config.get(field))]
        if impl == "none":
            return cls()
        if impl == ITERATION or ITERATION in names:
            return cls(ITERATION)
        return cls(impl, tuple(name for name in dict.fromkeys(names) if name in MODULES))

    @property
    def of_iteration(self) -> bool:
        """Whether all forwards and backwards are one graph."""
        return self.implementation == ITERATION

    @property
    def of_layers(self) -> bool:
        """Whether layers, or parts of them, are graphs."""
        return self.implementation in ("local", "transformer_engine")


def names_of(value: Any) -> list[str]:
    """The names of a scope, which Megatron takes as a list, or in one text with commas."""
    names = value.replace(",", " ").strip("[] ").split() if isinstance(value, str) else value or []
    return [str(name) for name in names]


def wrong_scope(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with these fields, one sentence each."""
    impl, wrong = config.get("cuda_graph_impl"), []
    if impl is not None and impl not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        wrong.append(f"config.cuda_graph_impl: {impl!r:.80}; known are {known}")
    for field in FIELDS:
        value = config.get(field)
        if not isinstance(value, (str, list, type(None))):
            wrong.append(f"config.{field}: {value!r:.80}; give a list such as [attn, mlp]")
            continue
        others = ("full", ITERATION, "full_iteration_inference")
        unknown = [name for name in names_of(value) if name not in (*MODULES, *others)]
        if unknown:
            known = ", ".join((*MODULES, *others[:2]))
            wrong.append(f"config.{field}: {', '.join(unknown):.80}; known are {known}")
    return wrong
