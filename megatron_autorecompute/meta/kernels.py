"""Stand-ins for Transformer Engine's modules and other fused kernels, for meta tensors. Each saves
for its backward what the real kernel saves, as its docstring says, with the source in
NVIDIA/TransformerEngine 2.x (TE below) or NVIDIA/Megatron-LM."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_autorecompute.compat import model_layers, versions
from megatron_autorecompute.meta import attention, expert_rows, mixers, ops
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import PRECISIONS
from megatron_autorecompute.patched import patched

_SIZES = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1}
ANY = Job(name="any", config=_SIZES, num_gpus=1, seq_length=1, global_batch_size=1, vocab_size=1)
"""A job that says nothing."""
_job = ANY
"""The job whose stand-ins are in place."""


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> torch.Tensor:
    """Fused attention. Saves: q, k, v, out and one fp32 per head and token (log-sum-exp). TE
    pytorch/attention/dot_product_attention/backends.py. Around flash_attn's, `Attention` copies."""
    more = attention.CAUSAL, window

    def run(*parts: torch.Tensor) -> ops.Ran:
        if not attention.one_tensor(*parts):
            parts = tuple(part.contiguous() for part in parts)
        out, statistics = ops.attention(*parts, *more)
        return out, (*parts, out, statistics), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        return ops.attention_backward(*saved, gradient, *more)

    return ops.kernel_with_backward(run, query, key, value)


def rotate(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Rotary embedding of x, any shape. Saves nothing but the shared angles. TE
    pytorch/attention/rope.py; Megatron fusions/fused_mla_yarn_rope_apply.py for q."""
    return ops.kernel_with_backward(
        lambda x: (ops.rotate(x), (), lambda _, gradient: [ops.rotate(gradient)]), x
    )


def _mla_kv(
    kv: torch.Tensor, k_position: torch.Tensor, *more: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v out of MLA's up-projection. Saves nothing but the shared angles.
    Megatron fusions/fused_mla_yarn_rope_apply.py `ApplyMLARotaryEmbKV`."""
    k_width, v_width = more[3:5]  # behind the cosines, the sines and the positions' width
    shapes = kv.shape, k_position.shape

    def run(kv: torch.Tensor, k_position: torch.Tensor) -> ops.Ran:
        return ops.mla_rotate(kv, k_position, k_width, v_width), (), backward

    def backward(_: ops.Saved, dk: torch.Tensor, dv: torch.Tensor) -> ops.Gradients:
        # Only their shapes are used: expanded scalars take no memory.
        like_kv, like_position = (dk.new_empty(()).expand(shape) for shape in shapes)
        return ops.mla_rotate_backward(dk, dv, like_kv, like_position)

    return ops.kernel_with_backward(run, kv, k_position)


Restored = Callable[[torch.Tensor], torch.Tensor]
"""What a backward makes of a tensor that was saved."""


def _stashed(saved: torch.Tensor) -> tuple[torch.Tensor, Restored]:
    """What experts save: under `moe_paged_stash` pages, from which a backward makes a tensor of the
    whole room. Copies run beside the layers, and take no time here. megatron-core
    transformer/moe/paged_stash.py, TE pytorch/utils.py `mark_grouped_tensor`."""
    share, shape, dtype = expert_rows.pages_of_room(_job), saved.shape, saved.dtype
    if share is None:
        return saved, _as_it_is
    pages = saved.new_empty(round(saved.nbytes * share), dtype=torch.uint8)
    return pages, lambda pages: pages.new_empty(shape, dtype=dtype)


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _activation(
    x: torch.Tensor, weights: torch.Tensor | None, gated: bool, in_fp8: bool = False
) -> torch.Tensor:
    """An activation as one kernel: SwiGLU and its like (`gated`) or one that is not, times the
    router's weights for experts. Saves: its input, stashed or as `in_fp8` says (Megatron's
    `activation_func_fp8_input_store`), and the weights. Megatron fusions/fused_bias_swiglu.py,
    fused_bias_geglu.py, fused_weighted_squared_relu.py and fused_bias_gelu.py."""
    restored: Restored = _as_it_is

    def run(x: torch.Tensor, weights: torch.Tensor | None) -> ops.Ran:
        nonlocal restored
        saved = x
        if weights is not None:
            saved, restored = _stashed(x)
        if in_fp8 and saved is x:
            saved = x.to(torch.float8_e4m3fn)
        return (ops.gated if gated else ops.pointwise)(x, weights), (saved, weights), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        x, weights = restored(saved[0]).to(gradient.dtype), saved[1]
        dx, dweights = ops.activation_backward(gradient, x, weights)
        return dx, None if weights is None else dweights

    return cast(torch.Tensor, ops.kernel_with_backward(run, x, weights))


def _cross_entropy(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Saves: the gradient, written over the logits. TE pytorch/cross_entropy.py."""
    return ops.kernel_with_backward(
        lambda x: (ops.cross_entropy(x), (x.detach(),), lambda saved, _: saved), logits
    )


class Norm(torch.nn.Module):
    """Stands for TENorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        biased = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.empty_like(self.weight)) if biased else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as x."""
        return ops.normalised(x, self.weight, self.bias)


class LinearModule(torch.nn.Module):
    """A linear layer of Transformer Engine, with weight [out, in] of this rank; with `experts`
    above 0 with weights of so many, whose tokens the dispatcher exchanges."""

    parallel = "none"
    normed = False
    save_original_input = False
    """Transformer Engine's: as an attribute, which Megatron sets under fp8 and fp4."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        experts: int = 0,
        **_: Any,
    ) -> None:
        super().__init__()
        kind = "expert_tensor_parallel" if is_expert else "tensor_model_parallel"
        self.group = tp_group or getattr(parallel_state, f"get_{kind}_group")()
        self.config, self.is_expert = config, is_expert
        self.inputs, self.outputs = input_size, output_size
        self.adapter: Any = None  # of LoRA
        if parallel_mode is not None:
            self.parallel = {"duplicated": "none"}.get(parallel_mode, parallel_mode)
        parallel = self.parallel
        size = self.group.size() if parallel != "none" else 1
        if parallel == "column":
            output_size //= size
        elif parallel == "row":
            input_size //= size
        split = size > 1 and not experts
        sequence = split and config.sequence_parallel and not is_expert
        # Under sequence parallelism a column parallel layer gathers its input, and a row parallel
        # one scatters its output; backward does the opposite.
        self.gathers = sequence and parallel == "column"
        self.scatters = sequence and parallel == "row"
        self.reduces = split and not sequence
        self.job, self.precision = _job, PRECISIONS[_job.precision]
        each = (experts,) * (experts > 0)

        def made(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(*each, *size, dtype=config.params_dtype))

        self.weight = made(output_size, input_size)
        self.bias = made(output_size) if bias else None
        self.layer_norm_weight = made(input_size) if self.normed else None
        biased = self.normed and config.normalization == "LayerNorm"
        self.layer_norm_bias = made(input_size) if biased else None
        self.skip_bias_add, self.te_return_bias = skip_bias_add, skip_bias_add and bias
        if is_expert:
            for parameter in self.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [..., in] to ([..., out], bias or None)."""
        shares = "" if self.adapter is None else self.shares
        x = x.contiguous()  # TE pytorch/module/base.py `prepare_forward`
        y = self._product(x, shares)
        if shares:
            y, x = y
        if self.bias is not None and not self.skip_bias_add:
            y = y.add_(self.bias)  # in the product's own epilogue
        if self.adapter is not None:
            y = y + self.adapter(x).reshape(y.shape)
        return y, self.bias if self.te_return_bias else None

    def _product(self, x: torch.Tensor, shares: str = "") -> Any:
        norm = self.layer_norm_weight, self.layer_norm_bias
        run = functools.partial(self._run, shares)
        return ops.kernel_with_backward(run, x, self.weight, *norm)

    def _run(self, shares: str, x: torch.Tensor, weight: torch.Tensor, *norm: Any) -> ops.Ran:
        """y = norm(x) W^T. Saves: the input, with a norm its statistics and the normalised input,
        too. The tensor that the weight gradient reads is quantised under fp8 and fp4, unless the
        module has `save_original_input`, and not saved if the weight is frozen, unless an adapter
        gets it, too (`shares`: this rank's part, or gathered). Under sequence parallelism this
        rank's part is saved, and gathered again in backward. A quantised copy of the weight is
        saved if it is not cached (`Job.copies_weights`). TE pytorch/module/layernorm_linear.py and
        linear.py."""
        saved_bytes = self.precision.saved_element_bytes
        kept = [weight]
        if self.job.copies_weights:
            kept.append(ops.quantize(weight, 2 * self.precision.copy_bytes))
        normed = x
        if self.normed:
            normed, *statistics = ops.normed(x, *norm)
            kept += [x, *statistics]
        quantises = saved_bytes < normed.element_size()
        own = quantises and not self.save_original_input
        saved = ops.quantize(normed, saved_bytes) if own else normed
        saved, restored = _stashed(saved) if weight.dim() == 3 else (saved, _as_it_is)
        if shares or weight.requires_grad:
            kept.append(saved)
        total = ops.gathered(normed, self.group) if self.gathers else normed
        shared = {"own": normed, "gathered": total}.get(shares)
        del normed
        if quantises and shares == "gathered":  # gathered in 16 bits for the adapter
            ops.quantize(total, saved_bytes)
        y = ops.gemm(total, weight, self.precision.name)
        if self.scatters:
            y = ops.scattered(y, self.group)
        elif self.reduces and self.parallel == "row":
            torch.distributed.all_reduce(y, group=self.group)
        backward = functools.partial(self._backward, shares, restored)
        return y if shared is None else (y, shared), kept, backward

    def _backward(
        self,
        shares: str,
        restored: Restored,
        saved: ops.Saved,
        gradient: torch.Tensor,
        of_norm: torch.Tensor | None = None,
    ) -> ops.Gradients:
        weight, kept = saved[0], saved[1 + self.job.copies_weights :]
        if self.scatters:
            gradient = ops.gathered(gradient, self.group)
        dx = ops.gemm_data_gradient(gradient, weight, self.precision.name)
        if self.gathers:
            dx = ops.scattered(dx, self.group, beside=True)
        elif self.reduces and self.parallel == "column":
            torch.distributed.all_reduce(dx, group=self.group, async_op=True)
        weight_gradient = None
        if weight.requires_grad:
            # Its parameter's hook frees it: without gradient accumulation fusion the gradient, and
            # with it the dummy of Transformer Engine's versions that keep none (`kept_bytes`).
            if not self.job.keeps_dummies("grouped" if weight.dim() == 3 else "linear"):
                weight_gradient = torch.empty_like(weight)
            total = restored(kept[-1])
            if self.gathers:
                total = ops.gathered(total, self.group, beside=True)
            ops.gemm_weight_gradient(gradient, total, weight, self.precision.name)
            weight.grad_added_to_main_grad = self.job.fuses_weight_gradients
            del total
        if shares == "own":  # Transformer Engine adds no gradient of a gathered one
            dx = dx + of_norm
        if self.normed:
            dx = ops.norm_backward(dx, kept[0], kept[1])
        return dx, weight_gradient, None, None

    @property
    def return_layernorm_output(self) -> bool:
        """Transformer Engine's: whether somebody besides gets the norm's output."""
        return self.normed and self.adapter is not None

    def normed_again(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the norm, which the module saves."""
        assert self.layer_norm_weight is not None
        return ops.normed(x, self.layer_norm_weight, self.layer_norm_bias)[0]

    @property
    def shares(self) -> str:
        """What of its norm an adapter gets: Transformer Engine's `return_layernorm_output`, and
        without userbuffers `return_layernorm_output_gathered` (Bridge peft/utils.py)."""
        if not self.normed:
            return ""
        return "gathered" if self.gathers and not self.job.resolved.tp_comm_overlap else "own"

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""


class GroupedLinear(LinearModule):
    """Experts of one rank: weight [experts, out, in]. TE pytorch/module/grouped_linear.py."""

    def __init__(self, num_gemms: int, *sizes: int, pg_collection: Any = None, **more: Any) -> None:
        group = pg_collection.expt_tp if pg_collection else None
        more |= {"is_expert": True, "tp_group": group, "experts": num_gemms}
        super().__init__(*sizes, **more)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, tokens_per_expert: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """x [tokens, in], sorted by expert, to [tokens, out]. Biases are added in the product, or
        returned, one [out] for each expert, if the caller adds them."""
        y = self._product(x)
        if self.adapter is not None:
            y = y + self.adapter(x).reshape(y.shape)
        if self.bias is None or not self.te_return_bias:
            return y, None
        return y, list(self.bias)


class Attention(torch.nn.Module):
    """Stands for TEDotProductAttention: q [s, b, heads, width] to [s, b, heads * v width]."""

    def __init__(
        self, config: Any, *, layer_number: int = 1, cp_comm_type: str | None = None, **_: Any
    ) -> None:
        super().__init__()
        window, skip = config.window_size, config.window_attn_skip_freq
        windowed = is_layer_window_attention(window, skip, layer_number)
        self.window_size = int(window[0]) + 1 if windowed else 0  # keys that each query sees
        self.dropout = None
        if config.attention_backend is AttnBackend.unfused:
            self.dropout = config.attention_dropout
        self.is_flash = config.attention_backend is AttnBackend.flash
        several = config.context_parallel_size > 1
        self.group = parallel_state.get_context_parallel_group() if several else None
        self.comm_type = cp_comm_type or "p2p"
        self.hierarchy = config.hierarchical_context_parallel_sizes

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        attn_mask_type: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """Attention is causal; masks are not read. Of packed samples, [tokens, heads, width], the
        result is [tokens, heads * v width]."""
        packed = query.dim() == 3
        if packed:
            query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        # flash-attn has the samples in front: copies of q, k and v go in, and a copy of what it
        # saves as output comes out (backends.py `FlashAttention.forward`, format sbhd).
        turned = self.is_flash and query.shape[1] > 1
        if turned:
            query, key, value = (part.clone() for part in (query, key, value))
        if self.dropout is not None:
            padded = attn_mask_type is not None and "padding" in attn_mask_type.name
            in_place = not _job.has_te(2, 19)
            out = attention.attend_with_scores(
                query, key, value, self.dropout, padded, in_place=in_place
            )
        elif self.group is None:
            out = _attention(query, key, value, self.window_size)
        else:
            # Views of the projection are copied first, as `_attention` says.
            tensors = [part.contiguous() for part in (query, key, value)]
            out = attention.attend_in_parallel(
                self.comm_type, tensors, self.group, self.window_size, self.hierarchy
            )
        out = (out.clone() if turned else out).flatten(2)
        return out.squeeze(1) if packed else out


class Adapter(torch.nn.Module):
    """LoRA's B A x of one linear layer, by Megatron's own linear layers in 16 bits under every
    precision (Megatron Bridge peft/utils.py `ParallelLinearAdapter`). Experts of a rank share one.
    """

    def __init__(self, of: Any, rank: int, dropout: float) -> None:
        super().__init__()
        config = copy.copy(of.config)
        config.sequence_parallel = False
        more = {
            "config": config,
            "bias": False,
            "init_method": lambda weight: weight,
            "is_expert": of.is_expert,
            "tp_group": of.group,
        }
        parts = {"input_is_parallel": True, "skip_bias_add": True}
        self.linear_in: torch.nn.Module
        if of.parallel == "row":
            self.linear_in = RowParallelLinear(of.inputs, rank, **parts, **more)
        else:
            reduced = not of.config.sequence_parallel
            self.linear_in = ColumnParallelLinear(
                of.inputs, rank, gather_output=True, disable_grad_reduce=not reduced, **more
            )
        whole = of.parallel != "column"
        self.linear_out = ColumnParallelLinear(rank, of.outputs, gather_output=whole, **more)
        self.dropout, self.group = dropout, of.group
        self.gathers, self.scatters = of.gathers and of.shares != "gathered", of.scatters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as the linear layer multiplies it, to a tensor like its output."""
        if self.dropout:
            x = torch.nn.functional.dropout(x, self.dropout)
        if self.gathers:
            x = gather_from_sequence_parallel_region(x, group=self.group)
        low, _ = self.linear_in(x)
        y, _ = self.linear_out(low)
        if self.scatters:
            y = scatter_to_sequence_parallel_region(y, group=self.group)
        return y * 2.0  # alpha / rank, whatever it is


def add_adapters(job: Job, model: Any) -> None:
    """Freeze a model of stand-ins and give it the job's adapters, where Megatron Bridge puts them:
    beside each module whose own or full name one of `target_modules` says (peft/module_matcher.py).
    """
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        own = name.rpartition(".")[-1]
        if isinstance(module, LinearModule) and any(
            own == target or re.fullmatch(target.replace("*", "(.*)"), name)
            for target in job.lora_target_modules
        ):
            module.adapter = Adapter(module, job.lora_rank, job.lora_dropout)
    if getattr(model, "pre_process", False):
        # As on every stage but the first, and on the first by Bridge's peft/recompute.py.
        model.embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())


def _layer(name: str, base: type[LinearModule], **fields: Any) -> type[LinearModule]:
    return type(name, (base,), fields)


LAYERS: dict[str, type[torch.nn.Module]] = {
    "TELinear": _layer("Linear", LinearModule),
    "TEColumnParallelLinear": _layer("ColumnLinear", LinearModule, parallel="column"),
    "TELayerNormColumnParallelLinear": _layer(
        "NormColumnLinear", LinearModule, parallel="column", normed=True
    ),
    "TERowParallelLinear": _layer("RowLinear", LinearModule, parallel="row"),
    "TEColumnParallelGroupedLinear": _layer("GroupedColumn", GroupedLinear, parallel="column"),
    "TERowParallelGroupedLinear": _layer("GroupedRow", GroupedLinear, parallel="row"),
    "TENorm": Norm,
    "TEDotProductAttention": Attention,
}
"""The stand-ins by their names in megatron-core's extensions/transformer_engine.py."""


def _general_gemm(a: Any, b: Any, dtype: torch.dtype, layout: str, **_: Any) -> tuple[Any]:
    """The product of a router, which reads its input as it is, where torch needs a copy in fp32."""
    return (ops.general_gemm(a, b, dtype, layout),)


Replacements = dict[str, dict[str, Any]]
"""By modules below megatron.core and classes, names in them and what takes their places."""


def _compiled() -> Replacements:
    """Of functions that Megatron has torch compile."""
    original = _module("fusions.fused_cross_entropy").calculate_gradients

    def gate(x: torch.Tensor, bias: Any = None, in_fp8: bool = False, *_: Any) -> torch.Tensor:
        return _activation(x, None, True, in_fp8)

    def weighted_gate(x: Any, bias: Any, weights: Any, in_fp8: bool = False, *_: Any) -> Any:
        return _activation(x, weights, True, in_fp8)

    def calculate_gradients(softmax: torch.Tensor, *rest: Any) -> torch.Tensor:
        """`grad_2d[...] -= ...` writes to its input where it runs as it is; inductor makes an
        `index_put` of it, whose result is a tensor of its own, in fp32."""
        result = softmax.clone()
        gradient: torch.Tensor = original(softmax, *rest)
        del result
        return gradient

    return {
        "transformer.mlp": {
            "bias_swiglu_impl": gate,
            "bias_geglu_impl": gate,
            "bias_gelu_impl": lambda x, bias: _activation(x, None, False),
            "weighted_bias_swiglu_impl": weighted_gate,
        },
        "transformer.moe.experts": {
            "weighted_bias_swiglu_impl": weighted_gate,
            "weighted_squared_relu_impl": lambda x, weights: _activation(x, weights, False),
        },
        # Around it Megatron's own code clamps, and copies what it clamped.
        "fusions.fused_bias_geglu": {
            "WeightedQuickGeGLUFunction": SimpleNamespace(
                apply=lambda x, weights, in_fp8, *_: _activation(x, weights, True, in_fp8)
            ),
            "WeightedBiasQuickGeGLUFunction": SimpleNamespace(apply=weighted_gate),
        },
        "fusions.fused_cross_entropy": {"calculate_gradients": calculate_gradients},
    }


def _module(name: str) -> Any:
    """A module below megatron.core, or one of its classes behind a colon."""
    module, _, owner = name.partition(":")
    found = importlib.import_module("megatron.core." + module)
    return getattr(found, owner) if owner else found


def _of_hybrids() -> Replacements:
    """For a HybridModel's layers, and latent MoE's linear layers."""
    variants = "transformer.experimental_attention_variant."
    delta = "ssm.gated_delta_net."
    return {
        "models.hybrid.hybrid_block": LAYERS,
        "ssm.mamba_mixer": {
            "HAVE_MAMBA_SSM": True,
            "HAVE_EINOPS": True,
            "MAMBA_HAS_STATE_DTYPE": False,
            "_check_mamba_sequence_packing_support": lambda **_: (True, None),
            "RMSNormGated": mixers.GroupNorm,
            "ExtendedRMSNorm": mixers.GroupNorm,
            "mamba_split_conv1d_scan_combined": mixers.split_conv1d_scan,
            "rearrange": mixers.rearrange,
        },
        "ssm.mamba_context_parallel": {"HAVE_EINOPS": True, "repeat": mixers.repeat},
        delta + "common": {
            "HAVE_FLA": True,
            "l2norm": mixers.l2norm,
            "chunk_gated_delta_rule": mixers.chunk_gated_delta_rule,
        },
        delta + "gdn": {
            "causal_conv1d": mixers.causal_conv1d,
            "chunk_gated_delta_rule": mixers.chunk_gated_delta_rule,
        },
        variants + "absorbed_mla": LAYERS,
        # fast_hadamard_transform's `HadamardTransformFn` saves nothing, as a rotation does.
        variants + "dsa": {"hadamard_transform": rotate},
        "transformer.moe.moe_layer": {"HAVE_TE": True, **LAYERS},
    }


def _replacements() -> Replacements:
    provider, specs = "extensions.transformer_engine_spec_provider", "models.gpt."
    spec_provider = {"TESpecProvider": _module(provider).TESpecProvider}
    utils, language = "transformer.moe.moe_utils", "models.common.language_module.language_module"
    permutation = expert_rows.PERMUTATION.items()

    def add_gradient(x: torch.Tensor, gradient: torch.Tensor, main_gradient: torch.Tensor) -> None:
        ops.gemm_weight_gradient(gradient, x, main_gradient, "bf16")

    names = "wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"
    return {
        provider: {**LAYERS, "TEActivationOp": None, "is_te_min_version": lambda *_: True},
        specs + "gpt_layer_specs": {**spec_provider, **LAYERS, "HAVE_TE": True},
        specs + "experimental_attention_variant_module_specs": spec_provider,
        "transformer.multi_token_prediction": spec_provider,
        "transformer.multi_latent_attention": {
            **LAYERS,
            "fused_apply_mla_rope_for_q": rotate,
            "fused_apply_mla_rope_for_kv": _mla_kv,
            # 0.19 calls it where it recomputes layernorm in fp8, and has None of it without TE.
            "set_save_original_input": _module(
                "extensions.transformer_engine"
            ).set_save_original_input,
        },
        "models.common.embeddings.rope_utils": dict.fromkeys(
            ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"), rotate
        ),
        "fusions.fused_softmax:FusedScaleMaskSoftmax": {
            "get_batch_per_block": staticmethod(lambda *_: 1)
        },
        "fusions.fused_softmax": dict.fromkeys(
            ("ScaledUpperTriangMaskedSoftmax", "ScaledMaskedSoftmax", "ScaledSoftmax"),
            SimpleNamespace(apply=attention.softmax),
        ),
        # It iterates until values no longer change, and here are none.
        "transformer.moe.router": {"sinkhorn": lambda logits, *_, **__: torch.exp(logits)},
        "transformer.moe.token_dispatcher": expert_rows.hybrid_ep(_job),
        utils: {
            "te_general_gemm": _general_gemm if _job.routers_of_te else None,
            **{name: made for name, made in permutation if hasattr(_module(utils), name)},
        },
        language: {"te_parallel_cross_entropy": _cross_entropy},
        # It would set variables of the environment, for Transformer Engine.
        language + ":LanguageModule": {"_set_attention_backend": lambda _: None},
        "tensor_parallel.layers": {
            "fused_weight_gradient_mlp_cuda": SimpleNamespace(**dict.fromkeys(names, add_gradient)),
            "_grad_accum_fusion_available": True,
        },
        **(_compiled() if _job.torch_compile else {}),
        **(_of_hybrids() if model_layers.pattern_types() else {}),
    }


def _frees_quantised() -> contextlib.AbstractContextManager[None]:
    """Makes EP overlap free the inputs that it frees in fp8 and fp4: configs here name neither."""
    nodes = versions.schedule_nodes()
    original = nodes.should_free_input

    def should_free_input(name: str, is_moe: bool, config: Any, *rest: Any) -> bool:
        quantised = copy.copy(config)
        quantised.fp8 = "e4m3"
        return bool(original(name, is_moe, quantised, *rest))

    return patched(nodes, "should_free_input", should_free_input)


@contextlib.contextmanager
def stand_ins(job: Job) -> Iterator[None]:
    """In this block Megatron's layer specs "with Transformer Engine" build a job's stand-ins."""
    global _job
    before, _job = _job, job
    try:
        with contextlib.ExitStack() as undo:
            for module, names in _replacements().items():
                for name, stand_in in names.items():
                    undo.enter_context(patched(_module(module), name, stand_in))
            if job.precision != "bf16":
                undo.enter_context(_frees_quantised())
            yield
    finally:
        _job = before
