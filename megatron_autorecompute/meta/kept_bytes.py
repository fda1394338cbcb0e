"""Bytes that stay from step to step on one rank, counted on a shard: parameters by their place in
the model, buffers of Transformer Engine (TE below, main of August 2026) and cuBLAS, and what MoE
dispatchers keep of their last microbatch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_autorecompute.compat import defects, model_layers
from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import PRECISIONS
from megatron_autorecompute.meta.model import Shard
from megatron_autorecompute.meta.static_bytes import (
    Parameters,
    Trained,
    Weights,
    optimizer_step_bytes,
    static_bytes,
)
from megatron_autorecompute.meta.step_end import iteration_flops
from megatron_autorecompute.policy import NONE, LayerPolicy
from megatron_autorecompute.profile import Deferred, LayerKind, StageRecord, StaticBytes
from megatron_autorecompute.runtime.live_bytes import LiveBytes, storage_bytes


class Counted:
    """Static bytes of one rank's parameters and buffers, by their place in the model.

    Args:
        job: the job of the shard.
        built: the shard.
        device: what it runs on.
        buffers: tensors that stay between steps; with TE only the output layer shares them.
        of_dispatcher: bytes that one layer's dispatcher keeps of the last microbatch.
    """

    def __init__(
        self,
        job: Job,
        built: Shard,
        device: Device,
        buffers: Sequence[torch.Tensor] = (),
        of_dispatcher: int = 0,
    ) -> None:
        model: Any = built.model
        self.job = job
        several = job.size("pipeline") > 1
        sites = model_layers.mtp_sites([model])
        self._embedding = counted_weights(model.embedding)
        self._head = counted_weights(model.output_layer) + counted_weights(
            model_layers.final_norm(model.decoder)
        )
        if several and not job.untie_embeddings_and_output_weights:
            # The last stage has a copy of the tied weights, without those of positions.
            self._head += counted_weights(model.embedding.word_embeddings)
        self._places: dict[int, tuple[Weights, StaticBytes]] = {}

        def place(weights: Weights, shared: dict[str, int], kept_bytes: int) -> Any:
            static = static_bytes(job, device, weights)
            return weights, replace(static, buffer_bytes=kept_bytes, shared=shared)

        layers = [
            layer for site in model_layers.block_sites([model]) for layer in site.block.layers
        ]
        for layer, kind in zip(layers, built.kind_of.values(), strict=True):
            kept_bytes = angle_bytes(layer) + of_dispatcher * kind.is_moe
            shared = shared_buffers(job, device, layer)
            found = place(counted_weights(layer), shared, kept_bytes)
            self._places |= dict.fromkeys(kind.layers, found)
        of_depths = shared_buffers(job, device, *(site.mtp for site in sites))
        depths = [(site, index == site.indices[0]) for site in sites for index in site.indices]
        for depth, (site, first) in enumerate(depths):
            # What runs for several depths counts for the first.
            weights = counted_weights(site.mtp if first else None)
            if several and depth == 0:
                weights += self._embedding  # so has the stage of the MTP depths
            kept_bytes = angle_bytes(site.mtp) + of_dispatcher * job.experts_of_depth
            kept_bytes *= first
            self._places[job.num_layers + depth] = place(weights, of_depths, kept_bytes)
        self.embedding = static_bytes(job, device, self._embedding)
        # The loss of an MTP depth runs the output layer too, on the stage of the head.
        head = shared_buffers(job, device, model.output_layer) | quantised_output_layer(job)
        self.head = replace(static_bytes(job, device, self._head), shared=head)
        self._buffer_bytes = storage_bytes(buffers)
        if job.transformer_impl != "local":
            self.head = replace(self.head, buffer_bytes=self._buffer_bytes)
            self._buffer_bytes = 0

    def with_ends_of(self, whole: Counted) -> Counted:
        """These counts, with those of the ends from the shard that has MTP depths."""
        self.job, self.head = whole.job, whole.head
        self._places = whole._places | self._places
        return self

    def layer(self, index: int) -> StaticBytes:
        """Static bytes of one layer of the whole model."""
        return self._places[index][1]

    def weights(self, layers: Sequence[int], embedding: bool, head: bool) -> Weights:
        """Parameters of one pipeline stage."""
        counts = [self._places[index][0] for index in layers]
        counts += [self._embedding] * embedding + [self._head] * head
        return sum(counts, Weights())

    def stage(self, layers: tuple[int, ...], embedding: bool, head: bool) -> StageRecord:
        """Record of one pipeline stage."""
        parts = [self.layer(index) for index in layers]
        parts += [self.embedding] * embedding + [self.head] * head
        if embedding or head:
            parts.append(StaticBytes(shared=graph_inputs(self.job)))
        counts = self.weights(layers, embedding, head)
        return StageRecord(
            layers=layers,
            static=StaticBytes.sum([*parts, StaticBytes(buffer_bytes=self._buffer_bytes)]),
            optimizer_step_peak_bytes=optimizer_step_bytes(self.job, counts),
        )

    def parameters_of_stages(self) -> tuple[Parameters, ...]:
        """The parameters of one rank of every stage."""
        return tuple(self.weights(*parts).total for parts in parts_of_stages(self.job))


def angle_bytes(layer: torch.nn.Module) -> int:
    """What latent attention with YaRN keeps in each layer: cosines and sines in 16 bits, and as
    many bytes of angles in the cache of a function (megatron-core
    yarn_rotary_pos_embedding.py)."""
    cached = [x for name, x in layer.named_buffers() if name.endswith(("cos_cached", "sin_cached"))]
    return 2 * storage_bytes(cached)


def counted_weights(part: Any) -> Weights:
    """Numbers of parameters of a part's modules, by how they are kept."""
    found = Weights()
    if part is None:
        return found
    linear = {id(m.weight) for m in part.modules() if isinstance(m, kernels.LinearModule)}
    rows = dict(_split_rows(part))
    for parameter in part.parameters():
        count = _counted(parameter, rows.get(id(parameter)))
        found += Weights(quantised=count) if id(parameter) in linear else Weights(others=count)
    return found


def _counted(parameter: torch.Tensor, rows: Sequence[int] | None) -> Parameters:
    """rows: of the matrices into which Muon splits it. It computes as much as this rank has:
    Megatron's default `muon_tp_mode` is blockwise."""
    count, is_expert = parameter.numel(), not getattr(parameter, "allreduce", True)
    if not parameter.requires_grad:
        return Parameters(frozen=count)
    # Experts of stand-ins are one tensor of three dimensions, in Transformer Engine one each.
    outside = getattr(parameter, "is_embedding_or_output_parameter", False)
    trained = Trained(count)
    if not outside and parameter.dim() == 2 + is_expert:
        experts = parameter.shape[0] if is_expert else 1
        rows = rows or parameter.shape[-2:-1]
        flops = sum(iteration_flops(each, parameter.shape[-1]) for each in rows)
        trained = Trained(count, count, experts * len(rows), experts * flops)
    return Parameters(expert=trained) if is_expert else Parameters(dense=trained)


def _split_rows(part: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Weights that Muon splits (`muon_split_qkv`), by id, and the rows of query, key and value."""
    for module in part.modules():
        joint: Any = getattr(module, "linear_qkv", None)
        if joint is None:
            continue
        query, key = module.query_projection_size, module.kv_projection_size
        rows = joint.weight.shape[0]
        keys = rows * int(key) // (int(query) + 2 * int(key))
        yield id(joint.weight), (rows - 2 * keys, keys, keys)


def parts_of_stages(job: Job) -> Iterator[tuple[tuple[int, ...], bool, bool]]:
    """The layers of every stage, and whether it has the embedding and the head."""
    for chunks in job.layout().stages:
        yield (
            tuple(sorted(layer for chunk in chunks for layer in chunk.layers)),
            any(chunk.embedding for chunk in chunks),
            any(chunk.head for chunk in chunks),
        )


OF_TORCH = "cuBLAS workspaces of torch"
OF_LINEAR = "cuBLAS workspace"
OF_GROUPED = "cuBLAS workspaces of grouped products"
GROUPED_STREAMS = 4
"""TE's `get_num_cublas_streams`, each with a workspace."""


def shared_buffers(job: Job, device: Device, *parts: torch.nn.Module | None) -> dict[str, int]:
    """Bytes by name of all such buffers that these modules use, as `StaticBytes.shared`."""
    modules = [each for part in parts if part is not None for each in part.modules()]
    return {**dummy_weight_gradients(job, modules), **workspaces(job, device, modules)}


def deferred_output_layer(job: Job) -> Deferred | None:
    """What `defer_embedding_wgrad_compute` keeps of microbatches on the head's stage until the
    pipeline drains: the gradients of their logits, and the output layer's inputs (megatron-core
    tensor_parallel/layers.py, `grad_output_buffer` and `embedding_activation_buffer`), whose graph
    keeps what the stage received, with its gradient."""
    if not job.resolved.defer_embedding_wgrad_compute:
        return None
    tokens = job.micro_batch_size * job.seq_length // job.size("context")
    tensor, hidden = job.size("tensor"), job.resolved.hidden_size
    input_size = tokens * hidden // (tensor if job.resolved.sequence_parallel else 1)
    each = 2 * (tokens * job.padded_vocab_size // tensor + 3 * input_size)
    limit = job.resolved.wgrad_deferral_limit
    return Deferred(each, 1 + job.mtp_num_layers, limit or None)


def quantised_output_layer(job: Job) -> dict[str, int]:
    """What `fp8_output_proj` adds: copies in MXFP8 of the output layer's bf16 weights, in both
    layouts, that Transformer Engine caches (megatron-core extensions/transformer_engine.py
    `TELMHeadColumnParallelLinear`, built outside fp8_model_init)."""
    if not job.resolved.fp8_output_proj or job.precision != "mxfp8":
        return {}
    copied = 2 * PRECISIONS["mxfp8"].copy_bytes * job.resolved.hidden_size
    rows = job.padded_vocab_size // job.size("tensor")
    return {"quantised copies of the output layer": round(copied * rows)}


SAMPLE_BYTES = 8 + 8 + 4 + 8
"""Of a token: itself, label, loss mask, position (megatron-core datasets/gpt_dataset.py)."""


def graph_inputs(job: Job) -> dict[str, int]:
    """Copies of a step's samples, whole sequences, that one CUDA graph of the iteration reads, on
    stages whose ranks load data (megatron-core full_cuda_graph.py `StaticBufferLoader`)."""
    if not job.graphs.of_iteration:
        return {}
    masks = job.seq_length * job.attention_mask_in_dataloader
    samples = job.num_microbatches * job.micro_batch_size
    return {"samples of a CUDA graph": samples * job.seq_length * (SAMPLE_BYTES + masks)}


def dummy_weight_gradients(job: Job, modules: Iterable[torch.nn.Module]) -> dict[str, int]:
    """One tensor per shape [out, in] of trained weights, 2 bytes per element under every precision,
    which backward returns with gradient accumulation fusion for DistributedDataParallel's hooks. TE
    pytorch/module/base.py `get_dummy_wgrad` caches it for linear layers and experts, and for
    megatron-core's output layer. `Job.keeps_dummies` says in which versions."""
    found: dict[str, int] = {}
    for module in modules:
        shape = _weight_shape(module)
        grouped = isinstance(module, kernels.GroupedLinear)
        if shape is not None and job.keeps_dummies("grouped" if grouped else "linear"):
            found[dummy_name(shape)] = 2 * shape[0] * shape[1]
    return found


def dummy_name(shape: Sequence[int]) -> str:
    """The name of the dummy of weights [out, in]."""
    return f"dummy weight gradient {shape[0]}x{shape[1]}"


def _weight_shape(module: Any) -> tuple[int, int] | None:
    linear = (kernels.LinearModule, ColumnParallelLinear, RowParallelLinear)
    if not isinstance(module, linear):
        return None
    if module.weight is None:  # an output layer that uses the embedding's weights
        return module.output_size_per_partition, module.input_size
    rows, columns = module.weight.shape[-2:]
    return (rows, columns) if module.weight.requires_grad else None


def workspaces(job: Job, device: Device, modules: Iterable[torch.nn.Module]) -> dict[str, int]:
    """cuBLAS workspaces.

    TE pytorch/cpp_extensions/gemm.py `get_cublas_workspace`: 32 MiB and 1 KiB from Hopper on, 4 MiB
    before, as much again for each of the 4 streams of grouped products, and for each of 3 streams
    with userbuffers (`tp_comm_overlap`). torch keeps its own, for what torch itself multiplies, for
    each of two threads' handles (aten/src/ATen/cuda/CublasHandlePool.cpp): 8 times 4096 KiB on
    Hopper, and since 2.12 on Blackwell; else 2 times 4096 KiB and 8 times 16 KiB, or what
    CUBLAS_WORKSPACE_CONFIG says.
    """
    modules = list(modules)
    routers = any(isinstance(module, TopKRouter) for module in modules)
    linear = [module for module in modules if isinstance(module, kernels.LinearModule)]
    te_bytes = (32 << 20) + 1024 if device.capability >= 9 else 4 << 20
    found = {}
    if (routers and not job.routers_of_te) or any(map(_is_of_torch, modules)):
        found[OF_TORCH] = 2 * _workspace_of_torch(job, device)
    if linear or (routers and job.routers_of_te):
        found[OF_LINEAR] = te_bytes
        if job.resolved.tp_comm_overlap:
            found["cuBLAS workspaces of userbuffers"] = 3 * te_bytes
    if any(isinstance(module, kernels.GroupedLinear) for module in linear):
        found[OF_GROUPED] = GROUPED_STREAMS * te_bytes
    return found


def _workspace_of_torch(job: Job, device: Device) -> int:
    large = 9 <= device.capability < 10
    if job.has_torch(2, 12):
        large |= 10 <= device.capability < 11 or 12 <= device.capability < 13
    given = ":4096:8" if large or job.resolved.deterministic_mode else ":4096:2:16:8"
    numbers = list(map(int, (job.cublas_workspace_config or given).split(":")[1:]))
    return sum(kib * count << 10 for kib, count in zip(numbers[::2], numbers[1::2], strict=True))


def _is_of_torch(module: torch.nn.Module) -> bool:
    """Whether it calls torch's own products."""
    if isinstance(module, kernels.Attention):
        return module.dropout is not None
    if isinstance(module, SharedExpertMLP):
        return bool(module.use_shared_expert_gate)
    return isinstance(module, (ColumnParallelLinear, RowParallelLinear))


class Dispatchers:
    """What MoE layers' dispatchers of a shard keep of the last microbatch, as `live` counts."""

    def __init__(self, model: torch.nn.Module, live: LiveBytes) -> None:
        layers = model_layers.numbered_layers([model])
        # From the last layer down: the graph of what one keeps leads to those below.
        self._keepers = [(at, defects.graph_keepers(layer)) for layer, at in reversed(layers)]
        self._live = live
        self._beside: dict[tuple[int, LayerPolicy], int] = {}
        self.kept_bytes = 0
        """The most that one keeps of a layer that recomputes nothing."""

    def after_forward(self, policy: Sequence[LayerPolicy]) -> None:
        """Read what they keep beside what layers save; policy: the choices that ran, by layer."""
        self._beside |= {(at, policy[at]): size for at, size in self._sizes() if size}

    def after_step(self, policy: Sequence[LayerPolicy]) -> None:
        """Read what they keep between steps."""
        plain = (size for at, size in self._sizes() if policy[at] == NONE)
        self.kept_bytes = max(self.kept_bytes, *plain, 0)

    def _sizes(self) -> list[tuple[int, int]]:
        return [(at, _own_bytes(keepers, self._live)) for at, keepers in self._keepers]

    def counted_once(self, kind: LayerKind) -> LayerKind:
        """A kind of the shard with `also_static_bytes`; of several layers the most counts."""

        def also(choice: LayerPolicy) -> int:
            own = [self._beside[i, choice] for i in kind.layers if (i, choice) in self._beside]
            return max(0, self.kept_bytes - max(own)) if own else 0

        choices = (replace(each, also_static_bytes=also(each.policy)) for each in kind.choices)
        return replace(kind, choices=tuple(choices))


def _own_bytes(keepers: Sequence[Any], live: LiveBytes) -> int:
    """The bytes of tensors that vanish with the objects that keep them, and come back empty."""
    before, known = live.current_bytes, {}
    for keeper in keepers:
        for name, each in vars(keeper).items():
            if isinstance(each, torch.Tensor) and live.counted_bytes([each]):
                storage = each.untyped_storage()
                length = storage.nbytes() // each.element_size()
                again = functools.partial(torch.empty, length, dtype=each.dtype, device=each.device)
                known[storage._cdata] = keeper, name, weakref.ref(storage), again
                setattr(keeper, name, None)
                del storage
            del each
    own_bytes = before - live.current_bytes
    for keeper, name, reference, again in known.values():
        if reference() is None:
            setattr(keeper, name, again())
    return own_bytes
