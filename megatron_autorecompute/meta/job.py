"""Describes a training job, in place of a launch script.

Fields have Megatron's own names, so that they can be copied from a launch script. This module reads
YAML and imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from megatron_autorecompute import json_records
from megatron_autorecompute.errors import OptionError, PipelineError
from megatron_autorecompute.meta.job_config import (
    ADAPTED,
    IN_A_JOB,
    LORA_TARGETS,
    MOST_WIDTH,
    GraphScope,
    Ranks,
    Resolved,
    check_config,
    precision_of,
    refuse_unmodelled,
)
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule

Count = Annotated[int, Field(ge=1, le=1 << 40)]
Percent = Annotated[str, Field(pattern=r"^(100(\.0+)?|\d{1,2}(\.\d+)?)$")]
Factor = Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)]
Tokens = Annotated[str, Field(pattern=r"^[1-9]\d{0,12}$")]
Uneven = Annotated[float, Field(ge=1, le=1024, allow_inf_nan=False)]
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]

TE_VERSION = "2.11"
"""Assumed of Transformer Engine where a job does not say."""
TORCH_VERSION = "2.11"
"""Assumed of torch where a job does not say."""
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job; `config` holds fields of Megatron's TransformerConfig by their names."""

    name: str
    """A label."""
    config: dict[str, Any]
    """Fields of Megatron's TransformerConfig: num_layers, hidden_size, num_moe_experts, ... A
    HybridModel also has hybrid_layer_pattern, which gives num_layers, mtp_num_layers and
    virtual_pipeline_model_parallel_size if they are left out."""
    num_gpus: Ranks
    """The number of GPUs of the whole job."""
    seq_length: Count
    """Tokens per sample."""
    micro_batch_size: Count = 1
    """Samples per microbatch and data-parallel rank."""
    global_batch_size: Count
    """Samples per step."""
    vocab_size: Count
    """Size of the vocabulary, before padding."""
    make_vocab_size_divisible_by: Count = 128
    """Megatron pads the vocabulary to a multiple of this times tp."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """Which layers Megatron builds. local: its own layers with unfused attention."""
    precision: Literal["bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"] = "bf16"
    """The precision of matrix products inside layers. fp8: one scale per tensor."""
    fp8_param_gather: bool = True
    """True: weights are kept in fp8 only. False: weights are bf16, with quantised copies."""
    disable_parameter_transpose_cache: bool = False
    """The config's field of that name. True: every microbatch makes quantised copies of bf16
    weights, and keeps them until its backward."""
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = "rope"
    """Megatron's --position-embedding-type."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Megatron's --rotary-percent: the share of every head that is rotated."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output layer has weights of its own."""
    accumulate_allreduce_grads_in_fp32: bool = True
    """True: main gradients are fp32 (4 bytes). False: they are bf16 (2 bytes)."""
    optimizer: Literal["adam", "muon"] = "adam"
    """Megatron's --optimizer. muon: embeddings, output layer, norms and biases still use Adam."""
    use_distributed_optimizer: bool = True
    """Whether the optimizer's state is divided over data-parallel ranks."""
    use_layer_wise_param_layout: bool = True
    """For muon. False: --no-use-layer-wise-param-layout; one rank then has a whole embedding."""
    num_distributed_optimizer_instances: Count = 1
    """Groups of data-parallel ranks that each have the whole optimizer state."""
    overlap_grad_reduce: bool = True
    """Whether data-parallel ranks reduce gradients while backward runs."""
    overlap_param_gather: bool = True
    """Whether weights are gathered from the ranks' shards while forward runs."""
    use_precision_aware_optimizer: bool = False
    """True: the three dtypes below are used. False: all three are fp32."""
    main_params_dtype: Dtype = "fp32"
    """The dtype of master weights."""
    store_param_remainders: bool = True
    """Whether fp32 master weights keep only the 2 bytes that bf16 weights lack."""
    exp_avg_dtype: Dtype = "fp32"
    """The dtype of Adam's first moment."""
    exp_avg_sq_dtype: Dtype = "fp32"
    """The dtype of Adam's second moment."""
    te_version: Annotated[str, Field(pattern=r"^(\d{1,3}\.\d{1,3}(\.\d{1,3})?)?$")] = TE_VERSION
    """Transformer Engine's version in the job's environment; empty: it is not installed."""
    torch_version: Annotated[str, Field(pattern=r"^\d{1,3}\.\d{1,3}(\.\d{1,3})?$")] = TORCH_VERSION
    """torch's version in the job's environment."""
    cublas_workspace_config: Annotated[str, Field(pattern=r"^(:\d{1,7}:\d{1,4})*$")] = ""
    """CUBLAS_WORKSPACE_CONFIG in the job's environment, such as :4096:8. Empty: torch's own size,
    or :4096:8 with deterministic_mode, because Megatron-LM then asks for it."""
    torch_compile: bool = True
    """Whether torch.compile works in the job. False (as with TORCHDYNAMO_DISABLE=1): functions that
    Megatron compiles, such as GELU with its bias, run operation by operation."""
    flash_attn: bool = True
    """Whether flash-attn is installed, in a version that Transformer Engine takes."""
    attention_mask_in_dataloader: bool = False
    """Whether every microbatch has a mask of one byte for each query and key. Megatron-LM makes one
    without --no-create-attention-mask-in-dataloader."""
    lora_rank: Annotated[int, Field(ge=0, le=MOST_WIDTH)] = 0
    """Above 0: weights are frozen, and lora_target_modules have adapters of this rank."""
    lora_target_modules: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
    """`target_modules` of Megatron Bridge's LoRA: names of linear layers, or patterns such as
    *.mlp.linear_fc1. All experts of a rank share one adapter."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The dropout of an adapter's input."""
    described_by: Literal["yaml", "flags", "recipe"] = "yaml"
    """Where the job was read from, which decides the form of what `plan` prints to paste."""
    moe_imbalance: dict[Percent, Uneven] = field(default_factory=dict)
    """An assumption: percentile of microbatches on the fullest rank -> factor on a MoE layer's
    bytes. The factor is 1 if all ranks have equally many tokens."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Above 0: samples of different lengths are packed into microbatches of up to so many tokens on
    a rank, after context parallelism has split them. seq_length is then the longest sample."""
    packed_samples: bool = False
    """Whether a microbatch is packed samples (THD), as always with max_tokens_per_microbatch. Local
    attention does not take packed samples."""
    sample_lengths: list[Count] | dict[Tokens, Factor] | str = field(default_factory=list)
    """The samples' tokens, for max_tokens_per_microbatch. Either a list, or a histogram (longest
    length of a bin -> weight), or the path of a JSONL file whose lines are numbers or objects with
    `length`."""

    @cached_property
    def resolved(self) -> Resolved:
        """What the config says, with Megatron's defaults."""
        return Resolved.of(self.config)

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same weights, context parallel ranks not counted."""
        ranks = self.size("tensor") * self.size("pipeline") * self.size("context")
        if self.num_gpus % ranks:
            raise OptionError(
                f"{self.name}: {self.num_gpus} GPUs cannot be divided into groups of {ranks} "
                "(tensor x pipeline x context parallel). Change num_gpus or a parallel size."
            )
        holders = self.size("pipeline") * self.size("expert") * self.expert_tensor_parallel
        if self.resolved.num_moe_experts and self.num_gpus % holders:
            raise OptionError(
                f"{self.name}: {self.num_gpus} GPUs cannot be divided into groups of {holders} "
                "(expert x expert tensor x pipeline parallel), which initialize_model_parallel "
                "refuses. Change num_gpus or a parallel size."
            )
        return self.num_gpus // ranks

    def size(self, what: str) -> int:
        """A parallel size: tensor, pipeline, context, or expert."""
        name = {"context": "context_parallel_size"}.get(what, f"{what}_model_parallel_size")
        return int(getattr(self.resolved, name))

    @property
    def expert_tensor_parallel(self) -> int:
        """Megatron's default is the tensor parallel size."""
        return self.resolved.expert_tensor_parallel_size or self.size("tensor")

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one data-parallel rank in a step."""
        samples = self.micro_batch_size * self.data_parallel
        if self.global_batch_size % samples:
            raise OptionError(
                f"{self.name}: global_batch_size {self.global_batch_size} is no multiple of "
                f"micro_batch_size {self.micro_batch_size} x {self.data_parallel} data-parallel "
                "ranks. Change one of them."
            )
        return self.global_batch_size // samples

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary, padded as by `vocab_size_with_padding`."""
        multiple = self.make_vocab_size_divisible_by * self.size("tensor")
        return -(-self.vocab_size // multiple) * multiple

    @property
    def dispatcher(self) -> str:
        """alltoall, allgather, or the backend of the flex dispatcher."""
        name = self.resolved.moe_token_dispatcher_type
        return self.resolved.moe_flex_dispatcher_backend if name == "flex" else name

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.resolved.num_layers

    @property
    def mtp_num_layers(self) -> int:
        """Multi-token-prediction depths."""
        return self.resolved.mtp_num_layers

    @property
    def fuses_weight_gradients(self) -> bool:
        """Whether products add to main_grad themselves."""
        return self.resolved.gradient_accumulation_fusion

    def keeps_dummies(self, what: Literal["linear", "grouped"]) -> bool:
        """Whether backward of these layers returns a dummy weight gradient that is kept.

        `kept_bytes.dummy_weight_gradients` says what it is for. TE keeps one for each shape of
        linear layers since 2.3 (commit ba5dc5dde, #1651), of experts since 2.10 (d2945c6a5, #2305).
        """
        since = {"linear": (2, 3), "grouped": (2, 10)}
        return self.fuses_weight_gradients and self.has_te(*since[what])

    @property
    def routers_of_te(self) -> bool:
        """Whether routers multiply by TE's `general_gemm` (since 2.0; megatron-core's
        transformer/moe/moe_utils.py `RouterGatingLinearFunction`), beside local layers too."""
        return self.has_te(2) and self.resolved.moe_router_dtype != "fp64"

    def has_te(self, *version: int) -> bool:
        """Whether Transformer Engine has this version or a later one."""
        return _parts(self.te_version) >= version

    def has_torch(self, *version: int) -> bool:
        """Whether torch has this version or a later one."""
        return _parts(self.torch_version) >= version

    @property
    def attention_mask_bytes(self) -> int:
        """The bytes of one microbatch's mask, [samples, 1, queries of a rank, keys] of one byte
        each. Megatron-LM's get_batch_on_this_cp_rank takes this rank's queries. Packed samples have
        none."""
        if not self.attention_mask_in_dataloader or self.packed_samples:
            return 0
        return self.micro_batch_size * self.seq_length * self.seq_length // self.size("context")

    @property
    def graphs(self) -> GraphScope:
        """What runs as CUDA graphs."""
        return GraphScope.of(self.config)

    @property
    def keeps_bf16_weights(self) -> bool:
        """Whether weights are parameters in bf16 from which quantised copies are made."""
        return self.precision == "nvfp4" or not self.fp8_param_gather

    @property
    def copies_weights(self) -> bool:
        """Whether every microbatch makes quantised copies of the weights, in both layouts, and
        keeps them until its backward: megatron-core extensions/transformer_engine.py passes no
        `is_first_microbatch`, so Transformer Engine caches no copy but saves it
        (pytorch/module/linear.py, `weightmat`)."""
        quantises = self.precision != "bf16" and self.keeps_bf16_weights
        return quantises and self.disable_parameter_transpose_cache

    @property
    def adam_keeps_main_params(self) -> bool:
        """Whether FusedAdam holds the master weights, reads main gradients as they are and writes
        the weights: OptimizerConfig `use_precision_aware_optimizer_no_fp8_or_ds_fp8`."""
        delayed = self.precision in ("bf16", "nvfp4") or (
            self.precision == "fp8" and self.resolved.fp8_recipe == "delayed"
        )
        return self.use_precision_aware_optimizer and (delayed or self.main_params_dtype != "fp32")

    @property
    def makes_dummies(self) -> bool:
        """Whether backward makes a dummy weight gradient each time, and frees it."""
        return self.fuses_weight_gradients and not self.keeps_dummies("linear")

    @property
    def pattern(self) -> HybridPattern | None:
        """The pattern of a HybridModel; None for a GPTModel."""
        text = self.resolved.hybrid_layer_pattern
        return None if text is None else HybridPattern.parse(text)

    @property
    def experts_of_depth(self) -> int:
        """MoE layers in a multi-token-prediction depth; one of GPT is like the last layer."""
        pattern = self.pattern
        return int(self.moe_pattern()[-1]) if pattern is None else pattern.depth.count("E")

    def moe_pattern(self) -> tuple[bool, ...]:
        """Which decoder layers are MoE layers, from the pattern or `moe_layer_freq`."""
        pattern = self.pattern
        if pattern is not None:
            return tuple(family == "moe" for family in pattern.families)
        freq = self.resolved.moe_layer_freq
        if not self.resolved.num_moe_experts:
            return (False,) * self.num_layers
        if isinstance(freq, int):
            return tuple(index % freq == 0 for index in range(self.num_layers))
        return tuple(bool(one) for one in freq)

    @property
    def saves_original_inputs(self) -> bool:
        """Whether Megatron tells quantising linear layers to save the input that others save too:
        not with delayed scales."""
        delayed = (self.precision, self.resolved.fp8_recipe) == ("fp8", "delayed")
        return self.precision != "bf16" and not delayed

    def linear_pattern(self) -> tuple[bool, ...]:
        """Which of a GPTModel's decoder layers have linear attention, by `linear_attention_freq`:
        all but every N-th, or those of a list."""
        freq = self.resolved.linear_attention_freq
        if self.pattern is not None or not freq:
            return (False,) * self.num_layers
        if isinstance(freq, int):
            return tuple((index + 1) % freq != 0 for index in range(self.num_layers))
        return tuple(bool(one) for one in freq)

    def layout(self) -> Layout:
        """The layers of each stage."""
        return Layout.of_config(self.resolved, self.pattern)

    def schedule(self) -> Schedule:
        """The order of a step."""
        layout = self.layout()
        return Schedule(
            layout.num_stages,
            layout.num_chunks,
            self.num_microbatches,
            self.resolved.microbatch_group_size_per_vp_stage,
            self.resolved.overlap_moe_expert_parallel_comm,
        )


_NOT_WITH_PATTERN = (
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "moe_layer_freq"),
    "overlap_moe_expert_parallel_comm",
)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def load_job(path: str | Path) -> Job:
    """Read a job from YAML (or JSON). Raises OptionError naming each bad field."""
    return job_from(read_description(path), str(path))


def read_description(path: str | Path) -> Any:
    """The plain data in a job's YAML (or JSON), for `job_from`. Raises OptionError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own takes the last of two values for one key, without a word."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            first = {key.value: key for key in reversed(keys)}
            for key in keys:
                if key is not first[key.value]:
                    problem = f"the key {key.value!r:.80} is given twice"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            return node

    try:
        text = json_records.read_text(path)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"Cannot read the job {json_records.named(path)}: {json_records.reason(error)}. Give "
            "the path of a YAML file."
        ) from error
    try:
        data = yaml.load(text, Loader)
    # The parser lets every error of its own out: of dates, of numbers, of the depth.
    except Exception as error:
        said = str(error).replace("<unicode string>", str(path))
        reason = " ".join(said.split()) or type(error).__name__
        raise OptionError(f"Cannot read the job {path}: {reason:.300}.") from error
    if isinstance(data, dict) and "config" not in data and ("kinds" in data or "profile" in data):
        raise OptionError(
            f"{path} is a profile or a plan, and a job was asked for. Give it as --profile {path} "
            "to plan or pareto, which then need no job."
        )
    return data


def job_from(data: Any, source: str) -> Job:
    """Check a job given as plain data.

    Raises:
        OptionError: a bad field, each named, or GPUs or a batch that cannot be divided.
        PipelineError: layers that cannot be divided among the stages.
    """
    for part in (data, data.get("config")) if isinstance(data, dict) else ():
        refuse_unmodelled(part if isinstance(part, dict) else {}, f"{source}: {{}}".format)
    try:
        job = TypeAdapter(Job).validate_json(json.dumps(data, allow_nan=False), strict=True)
    except ValidationError as error:
        items = error.errors(include_url=False)
        wrong = json_records.corrections(map(json_records.described, items))
        raise OptionError(f"{source} is no job description. {wrong}") from error
    except (TypeError, ValueError, RecursionError) as error:  # what JSON does not have
        raise OptionError(f"{source} is no job description: {error}.") from error
    job = replace(job, config=_whole(job.config, source))
    check_config(job.config, source)
    if job.pattern is not None:
        job.pattern.check_numbers(job.num_layers, job.mtp_num_layers)
    if unfit := contradictions(job):
        raise OptionError(f"{source} cannot be modelled. {json_records.corrections(unfit)}")
    job.layout()
    if not job.max_tokens_per_microbatch:  # else samples are packed into as many as it takes
        job.schedule()
    return job


def contradictions(job: Job) -> list[str]:
    """What a job's fields say that is not modelled, or that goes together nowhere, where Megatron
    says nothing of it without a device."""
    config, values, own = job.config, job.resolved, job.lora_target_modules
    pattern, context, said = job.pattern, job.size("context"), precision_of(config)
    moe_room, dispatcher = values.moe_expert_rank_capacity_factor, values.moe_token_dispatcher_type
    replaced = job.described_by == "recipe"  # by Bridge's mixed precision when a job starts
    strange = [t for t in own if t.rpartition(".")[-1].strip("*") not in ADAPTED]
    strange += [t for t in own if re.search(r"layers\.[^*]", t)]
    listed = (values.moe_layer_freq, values.window_attn_skip_freq, values.linear_attention_freq)
    heads, groups = values.num_attention_heads, values.num_query_groups
    exchanged = values.hierarchical_context_parallel_sizes or [0]
    widths = [(values.moe_shared_expert_intermediate_size, job.size("tensor"))]
    if values.num_moe_experts:
        widths.append((values.moe_ffn_hidden_size or 0, job.expert_tensor_parallel))
    else:
        widths.append((values.ffn_hidden_size or 0, job.size("tensor")))
    wrong = {
        f"moe_layer_freq, window_attn_skip_freq or linear_attention_freq lists more or fewer than "
        f"{values.num_layers} layers": any(
            isinstance(one, list) and len(one) != values.num_layers for one in listed
        ),
        f"num_attention_heads {heads} is no multiple of num_query_groups {groups}": (
            groups and heads % groups
        ),
        "ffn_hidden_size, moe_ffn_hidden_size or moe_shared_expert_intermediate_size is no "
        "multiple of the tensor parallel size": any(width % ranks for width, ranks in widths),
        "cp_comm_type a2a+p2p without hierarchical_context_parallel_sizes whose product is "
        "context_parallel_size": values.cp_comm_type == "a2a+p2p"
        and context not in (1, math.prod(exchanged)),
        f"seq_length {job.seq_length} is no multiple of {2 * context}, twice "
        "context_parallel_size": context > 1 and job.seq_length % (2 * context),
        f"precision {job.precision}, and fp8, fp4 and fp8_recipe in config say {said}": not replaced
        and said not in (None, job.precision),
        "neither bf16 nor fp16: training in fp32 is not modelled; set one (--bf16, --fp16)": (
            not replaced and config.get("bf16") is False and not values.fp16
        ),
        "transformer_impl local beside hybrid_layer_pattern, lora_rank or a precision but bf16; "
        "use transformer_engine": job.transformer_impl == "local"
        and (pattern or job.lora_rank or job.precision != "bf16"),
        "moe_expert_rank_capacity_factor without moe_token_dispatcher_type flex and "
        "moe_flex_dispatcher_backend hybridep, whose buffers alone are modelled": moe_room
        and (dispatcher, values.moe_flex_dispatcher_backend) != ("flex", "hybridep"),
        "moe_paged_stash_buffer_size_factor_cuda below 1: what even routing fills leaves for host "
        "memory, which is not modelled": values.moe_paged_stash
        and abs(values.moe_paged_stash_buffer_size_factor_cuda) < 1,
        "moe_imbalance without num_moe_experts": job.moe_imbalance and not values.num_moe_experts,
        "moe_imbalance beside moe_expert_rank_capacity_factor, with which buffers have their room "
        "however tokens are routed": job.moe_imbalance and moe_room,
        "sample_lengths without max_tokens_per_microbatch": job.sample_lengths
        and not job.max_tokens_per_microbatch,
        "lora_target_modules or lora_dropout without lora_rank": not job.lora_rank
        and (tuple(own) != LORA_TARGETS or job.lora_dropout),
        "lora_rank without lora_target_modules": job.lora_rank and not own,
        f"lora_target_modules {', '.join(strange):.80}: adapters are modelled on every layer that "
        f"has them, and known of {', '.join(ADAPTED)}; give these names, or patterns that end in "
        f"one, such as *.mlp.linear_fc1. {IN_A_JOB}": strange,
        f"{', '.join(filter(config.get, _NOT_WITH_PATTERN))} beside hybrid_layer_pattern, which "
        "says it already, or whose model Megatron does not build with it": pattern
        and any(map(config.get, _NOT_WITH_PATTERN)),
        "packed samples under context parallelism beside Mamba or Gated DeltaNet layers, which is "
        "not modelled": context > 1
        and (job.packed_samples or job.max_tokens_per_microbatch)
        and (values.linear_attention_freq or {*"MG"} & {*str(pattern or "")}),
        "use_mamba_mem_eff_path false, whose kernels of inference are not modelled": (
            config.get("use_mamba_mem_eff_path") is False
        ),
    }
    return [sentence for sentence, found in wrong.items() if found]


def _whole(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of config that have a value, and those that follow from `hybrid_layer_pattern`.

    Raises OptionError, with position and symbol, for a pattern that Megatron does not build.
    """
    given = {name: value for name, value in config.items() if value is not None}
    text = given.get("hybrid_layer_pattern")
    if not isinstance(text, str):
        return given
    try:
        pattern = HybridPattern.parse(text)
    except PipelineError as error:
        raise OptionError(f"{source}: {error}") from error
    follows: dict[str, Any] = {"num_layers": pattern.num_layers, "is_hybrid_model": True}
    if pattern.mtp_num_layers:
        follows["mtp_num_layers"] = pattern.mtp_num_layers
    stages, segments = given.get("pipeline_model_parallel_size", 1), len(pattern.segments)
    if isinstance(stages, int) and segments > stages > 0 and segments % stages == 0:
        follows["virtual_pipeline_model_parallel_size"] = segments // stages
    return {**follows, **given}
