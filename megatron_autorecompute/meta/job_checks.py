"""Refuses a job with impossible sizes, or sizes that contradict each other.

Here are those of which Megatron says nothing, or nothing that names a field. The others it refuses
itself, when its config is made before anything is built (`model.check_fields`) or in the build.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import corrections, described, shown_name
from megatron_autorecompute.meta.resolved import Resolved, wrong_scope
from megatron_autorecompute.profile import MOST_LAYERS

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
    recipe = {"blockwise": "fp8_block", "mxfp8": "mxfp8"}.get(str(config.get("fp8_recipe")))
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
