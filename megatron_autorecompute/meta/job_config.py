"""A job's config as values, what of it runs as CUDA graphs, and what is wrong with it.

What is not given has Megatron's default, and what is given has the type and the limits of its
field here. Sizes that are impossible or contradict each other are refused here if Megatron says
nothing of them, or nothing that names a field. The others it refuses itself, when its config is
made before anything is built (`model.check_fields`) or in the build.

Megatron has renamed the fields of graphs. Up to 0.18 there is `cuda_graph_scope`, and
`full_iteration` is one of its values. Later there is `cuda_graph_modules`, and full_iteration is a
`cuda_graph_impl`. This module reads both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import corrections, described, shown_name
from megatron_autorecompute.megatron_fields import names_of
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
OF_RECIPES = {"blockwise": "fp8_block", "mxfp8": "mxfp8"}
"""Those that a value of `fp8_recipe` says."""

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
"""The values of `cuda_graph_impl`."""
ITERATION = "full_iteration"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Parts of a layer that can be captured; none of them stands for whole layers."""
FIELDS = ("cuda_graph_modules", "cuda_graph_scope")


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


def wrong_scope(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with these fields, one sentence each."""
    impl, wrong = config.get("cuda_graph_impl"), []
    if impl is not None and impl not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        wrong.append(f"config.cuda_graph_impl: {impl!r:.80}; known are {known}")
    for name in FIELDS:
        value = config.get(name)
        if not isinstance(value, (str, list, type(None))):
            wrong.append(f"config.{name}: {value!r:.80}; give a list such as [attn, mlp]")
            continue
        others = ("full", ITERATION, "full_iteration_inference")
        unknown = [one for one in names_of(value) if one not in (*MODULES, *others)]
        if unknown:
            known = ", ".join((*MODULES, *others[:2]))
            wrong.append(f"config.{name}: {', '.join(unknown):.80}; known are {known}")
    return wrong


COMM_TYPES = ("p2p", "all_gather", "allgather", "a2a", "a2a+p2p")
"""Names of `cp_comm_type`."""
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


def check_config(
    config: Mapping[str, Any], seq_length: int, source: str, precision: str | None = None
) -> None:
    """Raise OptionError that names each bad field of a job's config.

    Args:
        config: fields of Megatron's TransformerConfig.
        seq_length: tokens per sample.
        source: what the error message calls the job.
        precision: the job's, which the config's fields may not contradict; None: not compared.
    """
    wrong = [*_wrong_values(config)] or [*_wrong_together(config, seq_length)]
    wrong += [] if precision is None else _not_of_precision(config, precision)
    if wrong:
        raise OptionError(f"{source} describes no model that can be built. {corrections(wrong)}")


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"config.{shown_name(name)}: {value!r}, which is no number"
    try:
        TypeAdapter(Resolved).validate_json(json.dumps(config), strict=True)
    except ValidationError as error:
        yield from (f"config.{described(item)}" for item in error.errors(include_url=False))
        return
    yield from wrong_scope(config)
    comm, layout = config.get("cp_comm_type"), config.get("pipeline_model_parallel_layout")
    if comm is not None and not _one_of(comm, COMM_TYPES):
        known = ", ".join(COMM_TYPES)
        yield f"config.cp_comm_type: {comm!r:.80}; give one of {known} for all layers"
    if layout is not None and not _is_layout(layout):
        yield (
            f"config.pipeline_model_parallel_layout: {layout!r:.80}; give a text such as "
            "Et*3|(tt|)*6mL"
        )
    for name in ("moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq"):
        if name in config and not _is_pattern(config[name], config["num_layers"]):
            yield (
                f"config.{name}: {config[name]!r:.80}; give a whole number from 1 on, or a list "
                "with 0 or 1 for each layer"
            )


def _wrong_together(config: Mapping[str, Any], seq_length: int) -> Iterator[str]:
    values = Resolved.of(config)
    heads = values.num_attention_heads
    groups = values.num_query_groups or heads
    context, tensor = values.context_parallel_size, values.tensor_model_parallel_size
    if not values.kv_channels and values.hidden_size % heads:
        yield f"hidden_size {values.hidden_size} is no multiple of num_attention_heads {heads}"
    if heads % groups:
        yield f"num_attention_heads {heads} is no multiple of num_query_groups {groups}"
    if context > 1 and seq_length % (2 * context):
        yield (
            f"seq_length {seq_length} is no multiple of {2 * context}, twice context_parallel_size"
        )
    elif values.sequence_parallel and seq_length % (tensor * context):
        yield (
            f"seq_length {seq_length} is no multiple of {tensor * context}, tensor times context "
            "parallel size, as sequence_parallel needs"
        )
    yield from _cannot_split_mlp(values)
    yield from _cannot_exchange_heads(values, groups)
    if values.hybrid_layer_pattern:
        yield from _lacks_of_families(config, values)
    if values.num_moe_experts:
        yield from _wrong_experts(values)


def _wrong_experts(values: Resolved) -> Iterator[str]:
    experts, parts = values.num_moe_experts, values.expert_model_parallel_size
    if values.moe_router_topk > experts:
        yield f"moe_router_topk {values.moe_router_topk} is more than num_moe_experts {experts}"
    if experts % parts:
        yield f"num_moe_experts {experts} is no multiple of expert_model_parallel_size {parts}"
    backend = values.moe_token_dispatcher_type, values.moe_flex_dispatcher_backend
    if values.moe_expert_rank_capacity_factor and backend != ("flex", "hybridep"):
        yield (
            "moe_expert_rank_capacity_factor without moe_token_dispatcher_type flex and "
            "moe_flex_dispatcher_backend hybridep, whose buffers alone are modelled; set them, or "
            "leave it out and state moe_imbalance"
        )
    pages = values.moe_paged_stash_buffer_size_factor_cuda
    if values.moe_paged_stash and abs(pages) < 1:
        yield (
            f"moe_paged_stash_buffer_size_factor_cuda {pages} is below 1: what even routing fills "
            "leaves for host memory, which is not modelled"
        )


def _cannot_split_mlp(values: Resolved) -> Iterator[str]:
    tensor = values.tensor_model_parallel_size
    name, width, ranks = "ffn_hidden_size", values.ffn_hidden_size, tensor
    if values.num_moe_experts:
        name, width = "moe_ffn_hidden_size", values.moe_ffn_hidden_size
        ranks = values.expert_tensor_parallel_size or tensor
    if (width or 0) % ranks:
        yield f"{name} {width} is no multiple of {ranks}, the tensor parallel size"
    shared = values.moe_shared_expert_intermediate_size
    if shared % tensor:
        yield (
            f"moe_shared_expert_intermediate_size {shared} is no multiple of {tensor}, the tensor "
            "parallel size"
        )


def _not_of_precision(config: Mapping[str, Any], precision: str) -> Iterator[str]:
    """The fields of the config that ask for another precision than the job's."""
    if config.get("bf16") is False and not config.get("fp16"):
        yield "neither bf16 nor fp16: training in fp32 is not modelled; set one (--bf16, --fp16)"
    if config.get("fp8") and not precision.startswith(("fp8", "mxfp8")):
        yield (
            f"config.fp8 {config['fp8']!r:.40} beside precision {precision}; set precision to fp8, "
            "fp8_block or mxfp8, or leave config.fp8 out"
        )
    if config.get("fp4") and precision != "nvfp4":
        yield (
            f"config.fp4 {config['fp4']!r:.40} beside precision {precision}; set precision to "
            "nvfp4, or leave config.fp4 out"
        )
    recipe = OF_RECIPES.get(str(config.get("fp8_recipe")))
    if recipe is not None and precision not in ("bf16", "nvfp4", recipe):
        yield (
            f"config.fp8_recipe {config['fp8_recipe']} beside precision {precision}; set precision "
            f"to {recipe}, or another fp8_recipe"
        )


def _cannot_exchange_heads(values: Resolved, groups: int) -> Iterator[str]:
    """What TE's `AttnFuncWithCPAndQKVOA2A` asserts of q, k and v."""
    comm, ranks = values.cp_comm_type, values.context_parallel_size
    comm = comm[0] if isinstance(comm, list) else comm
    sizes = values.hierarchical_context_parallel_sizes
    if comm == "a2a+p2p" and ranks > 1 and (not sizes or math.prod(sizes) != ranks):
        yield (
            f"cp_comm_type a2a+p2p, hierarchical_context_parallel_sizes {sizes!r:.40}; give two "
            f"numbers whose product is context_parallel_size {ranks}"
        )
        return
    ranks = {"a2a": ranks, "a2a+p2p": sizes[0] if sizes else 1}.get(str(comm), 1)
    heads = groups // values.tensor_model_parallel_size
    if heads % ranks and not values.multi_latent_attention:
        yield (
            f"cp_comm_type {comm} divides the heads of keys of a tensor parallel rank, {heads}, by "
            f"{ranks} ranks; use another cp_comm_type or size"
        )


_NEEDS_OF_SYMBOLS = {
    "E": ("num_moe_experts",),
    "G": (
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    ),
    "+": ("multi_latent_attention",),
    "D": (
        *("multi_latent_attention", "dsa_indexer_n_heads", "dsa_indexer_head_dim"),
        "dsa_indexer_topk",
    ),
}
"""Fields without which Megatron cannot build a layer of a hybrid pattern."""
_NOT_WITH_PATTERN = (
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "moe_layer_freq"),
)


def _lacks_of_families(config: Mapping[str, Any], values: Resolved) -> Iterator[str]:
    """What the layers of a hybrid pattern need, by position and symbol."""
    pattern = config["hybrid_layer_pattern"]
    for name in _NOT_WITH_PATTERN:
        if config.get(name):
            yield f"{name} beside hybrid_layer_pattern, which says it already; leave it out"
    if values.overlap_moe_expert_parallel_comm:
        yield (
            "overlap_moe_expert_parallel_comm beside hybrid_layer_pattern: HybridModel has no "
            "build_schedule_plan, which Megatron calls then; leave it out"
        )
    for symbol, names in _NEEDS_OF_SYMBOLS.items():
        lacking = [name for name in names if not config.get(name)]
        if symbol in pattern and lacking:
            place = f"{symbol!r} at position {pattern.index(symbol)} of hybrid_layer_pattern"
            yield f"{place} needs {', '.join(lacking)}"
    if "*" in pattern and values.multi_latent_attention:
        yield (
            f"'*' at position {pattern.index('*')} of hybrid_layer_pattern is not built with "
            "multi_latent_attention; write + for MLA"
        )
    if "G" in pattern and config.get("activation_func") != "silu":
        yield (
            f"'G' at position {pattern.index('G')} of hybrid_layer_pattern has a convolution that "
            "ends in SiLU alone; set activation_func to silu"
        )
    if "M" in pattern and config.get("use_mamba_mem_eff_path") is False:
        yield (
            f"'M' at position {pattern.index('M')} of hybrid_layer_pattern with "
            "use_mamba_mem_eff_path false runs kernels of inference, which Megatron does not test "
            "in training and which are not modelled; leave the field out"
        )


def _one_of(value: Any, known: Sequence[str]) -> bool:
    """Whether it is one of the known names, or a list of the same one for each layer."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and values[0] in known and all(one == values[0] for one in values)


def _is_pattern(value: Any, num_layers: Any) -> bool:
    if isinstance(value, list):
        return len(value) == num_layers and all(one in (0, 1) for one in value)
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_LAYERS


def _is_layout(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(
            isinstance(row, list) and all(isinstance(name, str) for name in row) for row in value
        )
    return isinstance(value, str)


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
_OF_LAYERS = re.compile(r"layers\.[^*]")
IN_A_JOB = "In a job auto measures each layer."


def check_targets(targets: Sequence[str], source: str) -> None:
    """Raise OptionError for targets that are not modelled; patterns have an asterisk."""
    if not targets:
        raise OptionError(
            f"{source}: lora_rank is given and lora_target_modules names no layer. Name some of "
            f"{', '.join(ADAPTED)}."
        )
    for target in targets:
        if _OF_LAYERS.search(target):
            raise OptionError(
                f"{source}: adapters are on some layers only ({target!r:.80} in "
                "lora_target_modules), and are modelled on every layer: what runs before the first "
                f"of them would be counted as kept. {IN_A_JOB}"
            )
        if target.rpartition(".")[-1].strip("*") not in ADAPTED:
            raise OptionError(
                f"{source}: lora_target_modules names {target!r:.80}, and adapters are known of "
                f"{', '.join(ADAPTED)}. Give these names, or patterns that end in one, such as "
                "*.mlp.linear_fc1."
            )
