"""A real Megatron training job of a given size: its model, DDP, optimizer, its own schedule.

The comparison and the benchmarks run it. Strategies are switched on one model: recompute changes no
result, and several models would not fit in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.compat import (
    checkpoints,
    layer_modules,
    model_facts,
    model_layers,
    rules,
    stage_layout,
    versions,
)
from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.meta.model import check_hybrid
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import LayerPolicy, MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import StaticBytes
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.probe import CudaBytes, Memory
from megatron_autorecompute.runtime.ranks import all_gather
from megatron_autorecompute.runtime.step_memory import static_bytes, tensors

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

VOCABULARY = 256
"""The text is read as bytes."""
EXPERTS: Mapping[str, Any] = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}
"""The experts of a HybridModel with E layers; each expert is as wide as an MLP."""


def _local_layers(config: TransformerConfig) -> ModuleSpec:
    pattern = stage_layout.pattern_of(config)
    spec: ModuleSpec = get_gpt_layer_local_spec() if pattern is None else model_facts.local_spec()
    return spec


@dataclass(frozen=True, slots=True)
class Variant:
    """Which model is trained. The default is a plain one with unfused layers."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the TransformerConfig, in place of those from the shape."""

    spec: Callable[[TransformerConfig], ModuleSpec] = _local_layers
    """Makes the spec of its layers from the config."""


class TrainingJob:
    """One rank of a job whose tokens are a text's bytes; `variant` is another model than the plain
    one. Every method must be called on all ranks.

    Raises: OptionError for a HybridModel that is not installed or cannot run here.
    """

    def __init__(self, shape: Shape, text: bytes, variant: Variant | None = None) -> None:
        variant = variant or Variant()
        self.shape = shape
        self.on_cuda = torch.cuda.is_available()
        self.config = _config(shape, variant)
        model_parallel_cuda_manual_seed(shape.seed, force_reset_rng=True)
        torch.manual_seed(shape.seed)
        self.chunks = [_wrapped(self.config, _model(shape, self.config, variant))]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                bf16=shape.bf16,
                params_dtype=self.config.params_dtype,
            ),
            self.chunks,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self._batches = _batches(shape, text, next(self.chunks[0].parameters()).device)

    def step(self) -> float:
        """Run one training step; returns its mean loss on the last stage, 0 on others."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=self._batches,
            model=self.chunks,
            num_microbatches=self.shape.num_microbatches,
            seq_length=self.shape.seq_length,
            micro_batch_size=self.shape.micro_batch_size,
            forward_only=False,
        )
        self.optimizer.step()
        if self.on_cuda:
            torch.cuda.synchronize()
        return sum(float(entry["loss"]) for entry in reduced) / max(1, len(reduced))

    def static(self) -> StaticBytes:
        """Bytes that this rank keeps through the whole step."""
        return static_bytes(self.chunks, self.optimizer)

    @contextmanager
    def memory(self) -> Iterator[Memory]:
        """Source of bytes in this block: torch's allocator, or `LiveBytes` on CPU.

        On CPU static bytes are not included, and steps are slower.
        """
        if self.on_cuda:
            yield CudaBytes()
            return
        with LiveBytes(tensors(self.chunks, self.optimizer)) as live:
            yield live

    def own_settings(self) -> list[str]:
        """Every setting that Megatron offers for this model and can run, as policy text.

        Settings that recompute less come first: none, sets of modules, block/N, uniform/N.
        """
        left_out = self.left_out()
        modules = [name for name in self._modules() if name not in left_out]
        sets = itertools.chain.from_iterable(
            itertools.combinations(modules, size) for size in range(1, len(modules) + 1)
        )
        choices = (LayerPolicy("selective", chosen) for chosen in sets)
        allowed = [choice for choice in choices if rules.is_allowed(self.config, choice)]
        return [
            "megatron:none",
            *(f"megatron:{choice}" for choice in allowed),
            *self.counted_settings(),
        ]

    def left_out(self) -> dict[str, str]:
        """Modules that Megatron allows here but cannot recompute itself, each with the reason."""
        return {
            name: megatron_fields.RUNS_FOREVER
            for name in self._modules()
            if megatron_fields.runs_forever(
                LayerPolicy("selective", (name,)), self.config.add_bias_linear
            )
        }

    def _modules(self) -> list[str]:
        """The modules that some layer of this model has and `recompute_modules` may name."""
        mine = {
            name
            for layer, _ in model_layers.numbered_layers(self.chunks)
            for name in rules.runnable_modules(layer)
        }
        return sorted(set().union(*all_gather(mine)))

    def counted_settings(self) -> list[str]:
        """Every block/N and uniform/N that differs on the fullest stage and that Megatron can run.

        Some versions run `uniform` only if every chunk's layers are a multiple of N.
        """
        chunks = [len(chunk) for chunk in stage_layout.counted_chunks(self.config)]
        counts: Sequence[int] = range(1, max(chunks) + 1)
        if versions.uniform_needs_whole_groups():
            counts = [n for n in counts if all(length % n == 0 for length in chunks)]
        if self.config.mtp_num_layers:  # with which Megatron allows no other
            counts = [1]
        blocks = [f"megatron:block/{n}" for n in range(1, max(chunks))]
        return blocks + [f"megatron:uniform/{n}" for n in counts]

    def policy(self, text: str) -> RecomputePolicy:
        """Policy text for this model, Megatron's named strategies included."""
        return RecomputePolicy.parse(
            text,
            num_layers=stage_layout.num_policy_layers(self.config),
            layout=stage_layout.counted_chunks(self.config),
            depth_layers=stage_layout.depth_layers(self.config),
        )

    def peak_bytes(self) -> tuple[int, bool]:
        """The most bytes alive on this rank during one step, static bytes included.

        The second value tells whether the device ran out of memory in that step.

        Raises: MachineError if it did and there are other pipeline stages, which wait for this one.
        """
        out_of_memory = False
        with self.memory() as memory:
            memory.reset_peak()
            try:
                self.step()
            except torch.OutOfMemoryError as error:
                if self.shape.pipeline_stages > 1:
                    raise MachineError(
                        f"A pipeline stage ran out of memory, and the others wait for it: {error} "
                        "Give --pipeline-stages 1, or a smaller --micro-batch-size or --seq-length."
                    ) from error
                out_of_memory = True
            peak = memory.peak_bytes
        if out_of_memory:  # what the step held is freed here
            checkpoints.leave_interrupted(self.chunks)
            if self.on_cuda:
                torch.cuda.empty_cache()
        return peak if self.on_cuda else peak + self.static().total_bytes, out_of_memory

    @contextmanager
    def strategy(self, text: str) -> Iterator[None]:
        """Recompute as Megatron itself does for `megatron:…`, otherwise as the policy says.

        Megatron's strategies run Megatron's own code, untouched: the config fields its block reads,
        or the attributes its constructors set from them.
        """
        if text.startswith("megatron:"):
            with self._megatron_strategy(text):
                yield
            return
        with apply(self.policy(text), self.chunks):
            yield

    @contextmanager
    def _megatron_strategy(self, text: str) -> Iterator[None]:
        strategy, policy = MegatronStrategy.parse(text), self.policy(text)
        rules.check_allowed(self.config, policy)
        layers = model_layers.numbered_layers(self.chunks)
        with ExitStack() as undo:
            if strategy.method in ("uniform", "block"):
                for name, value in megatron_fields.of_strategy(strategy).items():
                    undo.enter_context(patched(self.config, name, value))
            else:
                for layer, index in layers:
                    layer_modules.set_modules(layer, policy.layers[index].modules)
                    undo.callback(layer_modules.set_modules, layer, ())
            yield


def _config(shape: Shape, variant: Variant) -> TransformerConfig:
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    on_cuda = torch.cuda.is_available()
    pattern = shape.pattern
    values: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "pipeline_model_parallel_size": shape.pipeline_stages,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": shape.bf16,
        # gloo has no batched point-to-point calls; NCCL needs them.
        "batch_p2p_comm": on_cuda,
        "deallocate_pipeline_outputs": True,
        "use_cpu_initialization": not on_cuda,
    }
    if pattern is not None:
        check_hybrid("the comparison's job")
        values |= {"is_hybrid_model": True, "mtp_num_layers": pattern.mtp_num_layers or None}
        if "E" in str(pattern):
            values |= {**EXPERTS, "moe_ffn_hidden_size": 4 * shape.hidden_size}
        values |= {"mamba_num_groups": 1} if "M" in str(pattern) else {}
    mla = variant.fields.get("multi_latent_attention")
    config_class = MLATransformerConfig if mla else TransformerConfig
    config = config_class(**(values | dict(variant.fields)))
    stage_layout.note_pattern(config, shape.hybrid_layer_pattern)
    return config


def _model(shape: Shape, config: TransformerConfig, variant: Variant) -> GPTModel | HybridModel:
    ends: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": shape.seq_length,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        # Multi-latent attention rotates part of every head itself.
        "position_embedding_type": (
            "rope" if config.multi_latent_attention else "learned_absolute"
        ),
        "share_embeddings_and_output_weights": False,
    }
    if shape.hybrid_layer_pattern is None:
        return GPTModel(config, variant.spec(config), **ends)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    with model_facts.torch_norm():
        return HybridModel(
            config, variant.spec(config), hybrid_layer_pattern=shape.hybrid_layer_pattern, **ends
        )


def _wrapped(config: TransformerConfig, model: GPTModel | HybridModel) -> DistributedDataParallel:
    if torch.cuda.is_available():
        model.cuda()
    inner = Float16Module(config, model) if config.bf16 else model
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
    return chunk.train()


def _batches(shape: Shape, text: bytes, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Endless consecutive windows of the text: `GPTModel.forward`'s arguments, [b, s] each."""
    window = shape.seq_length + 1
    count = shape.micro_batch_size
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    positions = torch.arange(shape.seq_length, device=device).expand(count, -1)
    mask = torch.ones(1, 1, shape.seq_length, shape.seq_length, dtype=torch.bool, device=device)
    at = 0
    while True:
        if at + window * count > len(tokens):
            at = 0
        rows = tokens[at : at + window * count].view(count, window)
        at += window * count
        yield {
            "input_ids": rows[:, :-1].contiguous(),
            "position_ids": positions,
            "attention_mask": mask.triu(1),
            "labels": rows[:, 1:].contiguous(),
        }


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    output = model(**next(batches))

    def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        mean = per_token.float().mean()
        return mean, {"loss": mean.item()}

    return output, loss
