"""Builds one rank of the job's model on meta tensors, with as many layers of every kind as it has
choices, in one pipeline stage with embedding and head. The fake process group has all its ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compat import (
    layer_modules,
    layer_parts,
    model_facts,
    model_layers,
    stage_layout,
)
from megatron_autorecompute.errors import AutorecomputeError, OptionError
from megatron_autorecompute.meta import kernels, without_cuda
from megatron_autorecompute.meta.fake_ranks import StepShape, fake_ranks
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import FIELDS
from megatron_autorecompute.meta.meta_step import (
    StageStep,
    build_chunks,
    build_gpt,
    kept_between_steps,
    meta_config,
    trace_step,
)
from megatron_autorecompute.meta.without_cuda import deterministic
from megatron_autorecompute.patched import patched_environ
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import LayerKind
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.step_memory import is_out_of_memory

MAX_CHOICES = 96
"""Choices tried per kind of layer; MLA with MoE has 83."""

_PAGES = ("page_size", "buffer_size_factor_cuda", "buffer_size_factor_cpu")
LEFT_OUT = {
    **dict.fromkeys(("fp8", "fp4", "fp8_recipe", "cuda_graph_impl", "enable_cuda_graph")),
    **dict.fromkeys((*FIELDS, "external_cuda_graph")),
    # HybridEP's room and the pages of what is kept of it are in the stand-ins (`expert_rows`).
    **dict.fromkeys(("moe_expert_rank_capacity_factor", "moe_paged_stash")),
    **dict.fromkeys(f"moe_paged_stash_{rest}" for rest in _PAGES),
    **dict.fromkeys(("moe_router_fusion", "tp_comm_overlap", "moe_enable_deepep"), False),
    **dict.fromkeys(("moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm"), False),
    **dict.fromkeys(("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"), False),
    # Copies of the output layer's weights are counted (`kept_bytes.quantised_output_layer`).
    **dict.fromkeys(("fp8_param", "fp4_param", "fp8_output_proj"), False),
    # Ranks compare weights while they build the model.
    "test_mode": False,
    # These save what the single operators do (TE pytorch/ops/basic; attention/rope.py).
    **dict.fromkeys(("use_transformer_engine_op_fuser", "fused_single_qkv_rope"), False),
    # Megatron asks for fp8 beside these, which pad each expert's tokens to a multiple of 16 to
    # 256, which even routing mostly has, and HybridEP's stand-in counts.
    **dict.fromkeys(("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"), False),
    **megatron_fields.NO_RECOMPUTE,
    **megatron_fields.NO_OFFLOAD,
    megatron_fields.POLICY_FIELD: None,
}
"""Fields that the model is built without: they need a device, or are what is to be planned."""


EVEN_SPLIT = {
    **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")),
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
}
"""Fields that say where layers are, with the values for equally many in every chunk."""


@dataclass(frozen=True, slots=True)
class JobKind:
    """Layers of the whole model that Megatron builds alike."""

    is_moe: bool
    windowed: bool
    linear: bool
    """Whether a GPTModel's layer has linear attention (`experimental_attention_variant`)."""
    symbol: str
    """The symbol in a HybridModel's pattern; empty for a GPTModel."""
    layers: tuple[int, ...]


def job_kinds(job: Job) -> tuple[JobKind, ...]:
    """Every kind of decoder layer, in the order of its first layer."""
    found: dict[tuple[bool, bool, bool, str], list[int]] = {}
    pattern, window = job.pattern, (job.resolved.window_size, job.resolved.window_attn_skip_freq)
    for index, (is_moe, linear) in enumerate(
        zip(job.moe_pattern(), job.linear_pattern(), strict=True)
    ):
        symbol = "" if pattern is None else pattern.symbols[index]
        windowed = symbol in "*" and not linear and is_layer_window_attention(*window, index + 1)
        found.setdefault((is_moe, windowed, linear, symbol), []).append(index)
    return tuple(JobKind(*key, tuple(layers)) for key, layers in found.items())


def choices_by_kind(
    job: Job, kinds: Sequence[LayerKind]
) -> tuple[list[tuple[str, LayerPolicy]], list[int]]:
    """The choices of a profile's kinds, each with its kind's name; and how many they are of each of
    the job's kinds, 0 where an earlier one is built alike."""
    built = [next((k for k in kinds if one.layers[0] in k.layers), None) for one in job_kinds(job)]
    own = [kind if kind not in built[:at] else None for at, kind in enumerate(built)]
    choices = [(kind.name, each.policy) for kind in own if kind for each in kind.choices]
    return choices, [len(kind.choices) if kind else 0 for kind in own]


@dataclass(frozen=True, slots=True)
class Shard:
    """The built model and which kind each of its layers stands for."""

    model: torch.nn.Module
    kind_of: dict[int, JobKind]
    """Kind by layer index in the built model; MTP depths come after these and have no entry."""
    config: Any
    """Megatron's."""


@contextlib.contextmanager
def shard(
    job: Job, copies: Sequence[int], left_out: Mapping[str, Any] = LEFT_OUT
) -> Iterator[Shard]:
    """Build the shard of `shard_config`; in this block Megatron's parallel state is set up. Raises
    OptionError for a config that Megatron refuses, and MachineError as without_cuda does."""
    with meta_megatron(job):
        config, kind_of = shard_config(job, copies, left_out)
        shape = step_shape(job, 1)
        with fake_ranks(config, 0, shape):
            with torch.device("meta"):
                model = build_chunk(config, True, True, None, shape, job=job)
            adapted = any(isinstance(module, kernels.Adapter) for module in model.modules())
            if job.lora_rank and not adapted:
                raise OptionError(
                    f"{job.name}: no layer of the model is one of lora_target_modules "
                    f"({', '.join(job.lora_target_modules)}), and nothing would be trained. Name "
                    "layers that it has."
                )
            yield Shard(model.to(config.params_dtype).train(), kind_of, config)


def run_stage(
    job: Job,
    num_microbatches: int,
    policy: RecomputePolicy,
    stage: int,
    lengths: tuple[int, ...] = (),
) -> StageStep:
    """One stage in this process."""
    with built_stage(job, num_microbatches, stage, lengths) as (models, shape, step):
        parameters = [p for model in models for p in model.parameters()]
        add_main_gradients(parameters, dummies=job.makes_dummies)
        with apply(policy, models):
            return trace_step(models, shape, step)


@contextlib.contextmanager
def built_stage(
    job: Job,
    num_microbatches: int,
    stage: int,
    lengths: tuple[int, ...] = (),
    *,
    changed: Mapping[str, Any] | None = None,
) -> Iterator[tuple[list[torch.nn.Module], StepShape, JobStep]]:
    """The chunks of one stage, built with the fields of the config that `changed` gives, the sizes
    of a step and what runs a microbatch of it; in this block the process is the stage's first rank.
    """
    shape = step_shape(job, num_microbatches, lengths)
    with meta_megatron(job):
        fields = {**overlap_fields(job), "variable_seq_lengths": bool(lengths)}
        config = megatron_config(job, {**fields, **(changed or {})})
        with fake_ranks(config, stage, shape):
            build = functools.partial(build_chunk, job=job)
            models = build_chunks(config, shape, build, torch.device("meta"))
            yield models, shape, JobStep(job, None, lengths, loads_mask=True)


def overlap_fields(job: Job) -> dict[str, bool]:
    """Fields of EP overlap, which the layers of a profile are built without. Stand-ins have no
    weight gradients for `delay_wgrad_compute`."""
    names = ("overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release")
    return {name: True for name in names if job.config.get(name)}


@contextlib.contextmanager
def counted(
    job: Job, model: torch.nn.Module, policy: RecomputePolicy, step: JobStep
) -> Iterator[LiveBytes]:
    """In this block a shard's model runs a policy, and its bytes are counted: not those of
    parameters, main gradients, buffers, and what the step or Megatron keeps from step to step."""
    parameters = list(model.parameters())
    static = [*parameters, *add_main_gradients(parameters, dummies=job.makes_dummies)]
    static += [*model.buffers(), *step.static]
    with (
        apply(policy, [model]),
        LiveBytes(static) as live,
        kept_between_steps([model], live),
    ):
        yield live


@contextlib.contextmanager
def meta_megatron(job: Job) -> Iterator[None]:
    """In this block Megatron runs on meta tensors, with the stand-ins that the job needs."""
    # Without them Megatron warns, under sequence parallelism and (0.19) where it reads a layout's
    # text; nothing runs on a device or beside other ranks here.
    rank = os.environ.get("RANK", "0")
    quiet = patched_environ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": rank})
    with (
        without_cuda.activate(meta=True),
        deterministic(job.resolved.deterministic_mode),
        kernels.stand_ins(job),
        quiet,
        refusals(job.name),
    ):
        yield


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """Errors that Megatron's code has on a model are OptionError: its fields do not go together.
    `name` is the job's."""
    try:
        yield
    except (AutorecomputeError, MemoryError):
        raise
    except Exception as error:
        # The last line of Megatron's own code, or of a stand-in that it called: the fault may be
        # this package's and not the job's.
        place = None
        for frame, line in traceback.walk_tb(error.__traceback__):
            module = str(frame.f_globals.get("__name__", ""))
            package = module.partition(".")[0]
            if package == "megatron" or (place and package == "megatron_autorecompute"):
                place = f"{module}, line {line}"
        if place is None or is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise OptionError(
            f"{name}: Megatron cannot run this model: {type(error).__name__} in {place}: "
            f"{reason:.300}. Correct the job's fields; if they are right, report this."
        ) from error


def step_shape(job: Job, num_microbatches: int, lengths: Sequence[int] = ()) -> StepShape:
    """The job's sizes, with `num_microbatches` in a step, of `lengths` if they differ."""
    return StepShape(
        seq_length=job.seq_length,
        micro_batch_size=job.micro_batch_size,
        num_microbatches=num_microbatches,
        vocab_size=job.padded_vocab_size,
        data_parallel_size=job.data_parallel,
        lengths=tuple(lengths),
    )


class JobStep:
    """Megatron's `forward_step_func` over one batch of tokens, the same for every microbatch; or
    over one for each microbatch, if their lengths differ.

    Args:
        job: says the sizes.
        device: where they are; by default meta.
        lengths: tokens of each microbatch on all context parallel ranks; by default seq_length.
        loads_mask: whether the data loader's mask is alive in every forward, on every stage.

    `static`: tensors that stay from step to step: tokens, positions, labels [micro-batch, sequence
    of one rank], and the mask if attention reads one.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device | None = None,
        lengths: Sequence[int] = (),
        *,
        loads_mask: bool = False,
    ) -> None:
        own, ranks = job.attention_mask_bytes * loads_mask, job.size("context")
        # This rank's queries are taken out of the whole mask (Megatron-LM's
        # get_batch_on_this_cp_rank), which leaves a hole.
        self._masks_bytes = [own * ranks, own] if ranks > 1 else [own]
        self._device, self._several = device or torch.device("meta"), bool(lengths)
        packs = self._several or job.packed_samples
        made = {
            one: _batch(job, one, self._device, packs=packs)
            for one in set(lengths or [job.seq_length])
        }
        self._batches = [made[one] for one in lengths or [job.seq_length]]
        values = [part for batch in made.values() for part in batch.values()]
        packings = [part for part in values if isinstance(part, PackedSeqParams)]
        values += [part for packing in packings for part in vars(packing).values()]
        self.static = [value for value in values if isinstance(value, torch.Tensor)]

    def __call__(
        self, iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run one microbatch; the iterator says which if they differ, and else is not asked. EP
        overlap asks for the model's plan of it, in place of its output."""
        batch = self._batches[next(iterator) if self._several else 0]
        loaded = [torch.empty(n, dtype=torch.bool, device=self._device) for n in self._masks_bytes]
        del loaded[:-1]
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(**batch)
        del loaded
        return output, lambda losses: (losses.float().mean(), {})


def _batch(job: Job, length: int, device: torch.device, *, packs: bool) -> dict[str, Any]:
    """What a model takes of one microbatch. If it is packed (THD) it is one sample: bytes of fused
    attention are per token. Megatron's local attention takes no packed samples."""
    samples, tokens = job.micro_batch_size, length // job.size("context")
    local = job.transformer_impl == "local"
    with device:
        ids, labels = (torch.randint(job.vocab_size, (samples, tokens)) for _ in range(2))
        batch: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": torch.arange(tokens).repeat(samples, 1),
            "attention_mask": torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
            if local
            else None,
            "labels": labels,
        }
    if packs and not local:
        ends = torch.tensor([0, length], dtype=torch.int32)
        both = {name: ends for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        most = {name: length for name in ("max_seqlen_q", "max_seqlen_kv")}
        # Mamba layers read from it to which sample every token belongs.
        whole = {"total_tokens": length} if job.pattern is not None else {}
        batch["packed_seq_params"] = PackedSeqParams("thd", **both, **most, **whole)
    return batch


def add_main_gradients(
    parameters: Iterable[torch.Tensor], *, dummies: bool = False, in_fp32: bool = True
) -> list[torch.Tensor]:
    """Give trained parameters a main_grad, as DistributedDataParallel does; returns all of them.

    Args:
        parameters: of a model.
        dummies: whether the backward of Megatron's own linear layers makes a new tensor of the
            weight's shape for the hook.
        in_fp32: as `accumulate_allreduce_grads_in_fp32`; else of the parameter's dtype.
    """
    found = []
    for parameter in parameters:
        if parameter.requires_grad:
            if dummies:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            dtype = torch.float32 if in_fp32 else parameter.dtype
            main: Any = torch.zeros_like(parameter, dtype=dtype)
            parameter.main_grad = main  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_add_gradient)
            found.append(main)
    return found


def _add_gradient(parameter: Any) -> None:
    # DistributedDataParallel's hook. Where there is no gradient, and by this mark, the product has
    # added it.
    if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def build_chunk(
    config: Any,
    pre: bool,
    post: bool,
    vp_stage: int | None,
    shape: StepShape,
    *,
    job: Job,
    spec: Any = None,
) -> torch.nn.Module:
    """One chunk of the job's model, as `meta_step.Build`.

    spec: the spec of a HybridModel's layers; without, they are stand-ins, or Megatron's local ones.
    """
    local = job.transformer_impl == "local"
    ends: dict[str, Any] = {
        # YaRN's angles have the shapes of rope's, and its fields are on no TransformerConfig.
        "position_embedding_type": job.position_embedding_type.replace("yarn", "rope"),
        "rotary_percent": job.rotary_percent,
        "share_embeddings_and_output_weights": not job.untie_embeddings_and_output_weights,
    }
    pattern = stage_layout.pattern_of(config)
    if pattern is None:
        ends["use_transformer_engine"] = not local
        model = build_gpt(config, pre, post, vp_stage, shape, **ends)
    else:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        if local:
            spec = model_facts.local_spec()
        with model_facts.torch_norm() if local else contextlib.nullcontext():
            model = HybridModel(
                config,
                spec or model_facts.hybrid_spec(kernels.LAYERS),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.seq_length,
                hybrid_layer_pattern=str(pattern),
                pre_process=pre,
                post_process=post,
                vp_stage=vp_stage,
                **ends,
            )
    layer_parts.note_asked(config, job.config | {"fp8": job.precision != "bf16"})
    if job.saves_original_inputs:
        layer_modules.note_quantised(config, model)
    if job.lora_rank:
        kernels.add_adapters(job, model)
    return model


def shard_config(
    job: Job, copies: Sequence[int], left_out: Mapping[str, Any] = LEFT_OUT
) -> tuple[Any, dict[int, JobKind]]:
    """Megatron's config of the shard, built with so many layers of each of the job's `job_kinds`
    and without the fields `left_out`; and the kind of each of its layers."""
    numbers = zip(job_kinds(job), copies, strict=True)
    kind_of = dict(enumerate(kind for kind, number in numbers for _ in range(number)))
    fields = {
        **_pattern(job, kind_of),
        "num_layers": len(kind_of),
        "pipeline_model_parallel_size": 1,
        **EVEN_SPLIT,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None,
        "defer_embedding_wgrad_compute": False,
    }
    return megatron_config(job, fields, left_out), kind_of


def megatron_config(
    job: Job, changed: Mapping[str, Any], left_out: Mapping[str, Any] = LEFT_OUT
) -> Any:
    """The job's TransformerConfig with some fields changed and some left out, for meta tensors."""
    fields = {
        **_defaults(job),
        **{name: value for name, value in job.config.items() if name not in left_out},
        **changed,
    }
    if fields["moe_token_dispatcher_type"] == "flex" and job.dispatcher != "hybridep":
        fields["moe_token_dispatcher_type"] = "alltoall"  # its kernels have no stand-ins
    if job.resolved.use_transformer_engine_op_fuser:
        # Its activation reads interleaved halves as they are, and clamps them itself (TE
        # pytorch/ops/fused/grouped_mlp.py saves one tensor, `activation_in`); Megatron's own code,
        # which runs here, makes copies for both.
        for name in ("moe_mlp_glu_interleave_size", "activation_func_clamp_value"):
            fields.pop(name, None)
    pattern = fields.pop("hybrid_layer_pattern", None)
    if pattern is not None:
        check_hybrid(job.name)
    config = meta_config(model_facts.config_of(fields, job.name))
    stage_layout.note_pattern(config, pattern)
    config.gradient_accumulation_fusion = job.fuses_weight_gradients
    config.masked_softmax_fusion = job.resolved.masked_softmax_fusion
    return config


def check_fields(job: Job) -> None:
    """Raise OptionError for fields that Megatron refuses together, those of the pipeline and of EP
    overlap included, which a shard is built without."""
    overlap = "overlap_moe_expert_parallel_comm"
    left_out = {name: value for name, value in LEFT_OUT.items() if name != overlap}
    with meta_megatron(job):
        megatron_config(job, {}, left_out)


def check_hybrid(name: str) -> None:
    """Raise OptionError if the installed megatron-core has no HybridModel; `name` is the job's."""
    if not model_layers.pattern_types():
        raise OptionError(
            f"{name}: hybrid_layer_pattern describes a HybridModel, which megatron-core has from "
            "0.18 on. Install a newer one, or leave the pattern out for a GPTModel."
        )


def _defaults(job: Job) -> dict[str, Any]:
    """Values that Megatron-LM's arguments set, if TransformerConfig's own default differs."""
    fused = job.transformer_impl == "transformer_engine"
    dtype = torch.float16 if job.resolved.fp16 else torch.bfloat16
    return {
        "bf16": dtype == torch.bfloat16,
        "transformer_impl": job.transformer_impl,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "apply_rope_fusion": fused and job.position_embedding_type in ("rope", "yarn"),
        "bias_activation_fusion": fused and job.resolved.gated_linear_unit,
        "moe_grouped_gemm": fused and bool(job.resolved.num_moe_experts),
        "moe_token_dispatcher_type": job.resolved.moe_token_dispatcher_type,
    }


def _pattern(job: Job, kind_of: dict[int, JobKind]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    pattern = job.pattern
    if pattern is not None:
        symbols = "".join(kind.symbol for kind in kind_of.values())
        fields["hybrid_layer_pattern"] = str(replace(pattern, segments=(symbols,)))
    elif job.resolved.num_moe_experts:
        fields["moe_layer_freq"] = [int(kind.is_moe) for kind in kind_of.values()]
    if job.resolved.linear_attention_freq:
        fields["linear_attention_freq"] = [int(kind.linear) for kind in kind_of.values()]
    if job.resolved.window_size:
        fields["window_attn_skip_freq"] = [int(kind.windowed) for kind in kind_of.values()]
    return fields
