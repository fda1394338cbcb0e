"""A job's config as values, and what of it runs as CUDA graphs.

What is not given has Megatron's default. Values that contradict each other Megatron refuses itself
(`model.check_fields`), or `job.contradictions` where it says nothing without a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import corrections, described
from megatron_autorecompute.megatron_fields import names_of
from megatron_autorecompute.profile import MOST_LAYERS

MOST_RANKS = 1 << 20
MOST_WIDTH = 1 << 24
"""The most elements of a hidden state; more than any model has."""
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Layers = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Experts = Annotated[int, Field(ge=1, le=1 << 12)]
ByLayer = Annotated[int, Field(ge=1, le=MOST_LAYERS)] | list[Literal[0, 1]]
"""The number of layers from one to the next, or 0 or 1 for each layer."""
Captured = Literal[
    "attn",
    "mlp",
    "moe",
    "moe_router",
    "moe_preprocess",
    "mamba",
    "full",
    "full_iteration",
    "full_iteration_inference",
]
"""Parts of a layer that CUDA graphs can capture; the last three stand for more than that."""


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
    window_attn_skip_freq: ByLayer | None = None
    linear_attention_freq: ByLayer | None = None
    mtp_num_layers: Annotated[int, Field(ge=0, le=64)] = 0
    """The number of depths, where Megatron has None for 0."""
    hybrid_layer_pattern: str | None = None
    """An argument of HybridModel, and in a job's config with the others."""

    num_moe_experts: Annotated[int, Field(ge=0, le=1 << 12)] = 0
    """The number of experts, where Megatron has None for 0."""
    moe_layer_freq: ByLayer = 1
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
    cp_comm_type: Literal["p2p", "a2a", "a2a+p2p"] | None = None
    """Megatron also takes a list of one name for each layer."""
    hierarchical_context_parallel_sizes: list[int] | None = None
    virtual_pipeline_model_parallel_size: Ranks | None = None
    microbatch_group_size_per_vp_stage: Ranks | None = None
    num_layers_in_first_pipeline_stage: Layers | None = None
    num_layers_in_last_pipeline_stage: Layers | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    tp_comm_overlap: bool = False
    overlap_p2p_comm: bool = True
    """Megatron-LM sets it where chunks interleave, the one case in which it counts."""
    deallocate_pipeline_outputs: bool = True
    """Megatron-LM sets it."""

    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_modules: list[Captured] | None = None
    cuda_graph_scope: list[Captured] | None = None

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
        named = {each.name for each in fields(cls)}
        return cls(**{n: v for n, v in config.items() if n in named and v is not None})


@dataclass(frozen=True, slots=True)
class Precision:
    """How a linear layer multiplies, and what it keeps."""

    name: str
    """Key of the peak rates in devices.json."""
    saved_element_bytes: float
    """Bytes kept for each element of an input that a weight gradient needs."""
    copy_bytes: float = 0
    """Bytes for each element of a quantised weight in one layout."""
    rows: int = 1
    """Rows of an expert are padded to a multiple of it (moe_utils.py
    `get_align_size_for_quantization`)."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Megatron's fields for it."""


PRECISIONS = {
    "bf16": Precision("bf16", 2),
    # TE pytorch/tensor: Float8Tensor has one scale for the tensor, Float8BlockwiseQTensor an fp32
    # one for 128 elements of an input and 128 x 128 of a weight, MXFP8Tensor a byte for 32,
    # NVFP4Tensor a byte for 16.
    "fp8": Precision("fp8", 1, 1, 16, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "fp8_block": Precision(
        "fp8", 1 + 4 / 128, 1 + 4 / 128**2, 16, {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    ),
    "mxfp8": Precision("fp8", 1 + 1 / 32, 1 + 1 / 32, 32, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    "nvfp4": Precision("fp4", 9 / 16, 9 / 16, 64, {"fp4": "e2m1", "fp4_recipe": "nvfp4"}),
}
"""A job's precisions."""
ITERATION = "full_iteration"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Parts of a layer that can be captured; none of them stands for whole layers."""
FIELDS = ("cuda_graph_modules", "cuda_graph_scope")
"""Megatron's field for them: the second up to 0.18, where `full_iteration` is one of its values."""


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
        impl = next((impl for name, impl in old.items() if config.get(name)), "none")
        impl = config.get("cuda_graph_impl") or impl
        names = [one for name in FIELDS for one in names_of(config.get(name))]
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


_FSDP = (
    "FSDP shards weights and gradients, which is not modelled without a device: bytes would be "
    "those of whole weights on every rank. Leave it out to see the job without it."
)
UNMODELLED = {
    **dict.fromkeys(("use_megatron_fsdp", "use_torch_fsdp2"), _FSDP),
    "optimizer_cpu_offload": (
        "an optimizer in host memory is not modelled without a device: its state would count on "
        "the GPU. Leave it out to see the job without it, or use auto in the job."
    ),
}
"""Settings that a job may not have, and why."""


def refuse_unmodelled(settings: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Raise OptionError for a setting that is on and not modelled; `named` says how it is asked
    for."""
    for name, reason in UNMODELLED.items():
        if settings.get(name):
            raise OptionError(f"{named(name)}: {reason}")


def precision_of(settings: Mapping[str, Any]) -> str | None:
    """The precision that Megatron's fields for fp8 and fp4 say; None if they are not set."""
    if settings.get("fp4"):
        return "nvfp4"
    if not settings.get("fp8"):
        return None
    scaled = {"blockwise": "fp8_block", "mxfp8": "mxfp8"}
    return scaled.get(str(settings.get("fp8_recipe")), "fp8")


def check_config(config: Mapping[str, Any], source: str) -> None:
    """Raise OptionError that names each field of a wrong type or value; `source` is what the
    message calls the job."""
    try:
        TypeAdapter(Resolved).validate_json(json.dumps(config), strict=True)
    except ValidationError as error:
        wrong = (f"config.{described(item)}" for item in error.errors(include_url=False))
        raise OptionError(
            f"{source} describes no model that can be built. {corrections(wrong)}"
        ) from error


LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The default targets of Bridge's LoRA (peft/lora.py)."""
ADAPTED = (
    *LORA_TARGETS,
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "linear_qkv_down_proj"),
    *("linear_wq_b", "linear_wk", "linear_weights_proj"),
    *("in_proj", "out_proj", "eh_proj", "fc1_latent_proj", "fc2_latent_proj"),
)
"""Names that megatron-core's layers give their linear layers."""
IN_A_JOB = "In a job auto measures each layer."
