"""Models the time of every operation, in a dispatch mode over meta tensors, as
docs/decisions/time-model.md says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.devices import Device, Efficiency

RING = "broadcast_"
"""A step of ring attention, which `meta.attention` writes so."""
ALLTOALL = "alltoall_base_"
_TOKENS = 1 << 14
"""The number of tokens with random scores; it gives 1%."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Over which experts a router that prefers none spreads the copies of a token."""

    experts: int
    copies: int
    """The copies of each token."""
    groups: int = 1
    """`moe_router_num_groups`: equal parts of the experts, in order."""
    chosen: int = 1
    """`moe_router_group_topk`: groups that the copies of one token are for."""


@functools.cache
def share_with_copies(spread: Spread, parts: int) -> float:
    """Share of a token's pairs with one of so many equal parts of the experts, in order, that have
    a copy for the part: of random scores by Megatron's rule (transformer/moe/moe_utils.py
    `group_limited_topk`)."""
    each = spread.experts // spread.groups
    scores = np.random.default_rng(0).random((_TOKENS, spread.groups, each))
    best = np.sort(scores)[:, :, -(spread.copies // spread.chosen) :].sum(axis=2)
    left = np.argsort(best)[:, : spread.groups - spread.chosen, None]
    np.put_along_axis(scores, left, -1.0, axis=1)
    found = np.argsort(scores.reshape(_TOKENS, -1))[:, -spread.copies :]
    has = np.zeros((_TOKENS, parts))
    np.put_along_axis(has, found * parts // spread.experts, 1.0, axis=1)
    return float(has.mean())


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a device, at the shares of their peaks that are assumed."""

    device: Device
    efficiency: Efficiency

    def seconds(
        self, name: str, whole_bytes: int, ranks: Sequence[int], spread: Spread | None = None
    ) -> float:
        """Seconds of one collective.

        Args:
            name: the name of the operation in torch's `c10d`.
            whole_bytes: everything that the group exchanges, as one of its ranks sees it.
            ranks: the ranks of the group, by their place in the job.
            spread: of an all-to-all of tokens by DeepEP or HybridEP: a domain gets one of all
                copies that are for its ranks and hands it on over its link.
        """
        size, reached = len(ranks), self.efficiency
        domain = self.device.link_domain
        local = sum(rank // domain == ranks[0] // domain for rank in ranks)
        link = self.device.link_bytes * reached.link
        network = self.device.network_bytes * reached.network
        per_rank_us = 0 if spread else reached.rank_us * (size - 1)
        start = (reached.collective_us + per_rank_us) * 1e-6
        if name.startswith("alltoall"):
            near, far = whole_bytes * (local - 1) / size, whole_bytes * (size - local) / size
            if spread and far:
                domains = size // local
                near = whole_bytes * (local - 1) / local
                far *= domains / spread.copies * share_with_copies(spread, domains)
            return start + max(near / link, far / network)
        if name == RING:
            return start + whole_bytes / (link if local == size else network)
        times = 2 if name.startswith("allreduce") else 1
        rate = link if local == size else min(link, network * local)
        return start + times * whole_bytes * (size - 1) / size / rate


_PRECISIONS = ("bf16", "fp8", "fp4")
_ASYNC = "async_op"
TAKEN_BY_NCCL = 1 - 1.18 / 2.08
"""Share of a collective's time that a product beside it loses: on A100 one took 2.08 ms beside an
all-gather of NCCL's, and 1.18 alone (NVIDIA/nccl issue 1428)."""
_SPLIT = ("_allgather_base_", "_reduce_scatter_base_")
NARROW = {9.0: 902 / 1393, 10.0: 902 / 1393}
"""Share of attention's rate that heads of 64 reach, by CUDA's compute capability, where the
exponentials take longer than the products: TFLOP/s forward with 64 and with 128 at 4,096 tokens,
FlashAttention-4 on a Blackwell (Dao-AILab/flash-attention pull request 2605). Blackwell Ultra
computes two exponentials in the time of one."""
_NARROW_WIDTH = 64
BESIDE_WINDOW = {9.0: 80, 10.0: 440, 10.3: 720}
"""Keys that a query takes the time of beside its window, by the same: kernels compute whole tiles,
and begin and end for few of them. Of cuDNN's times on H200, GB200 and GB300 with heads of 64 at
4,096 tokens (NVIDIA/cudnn-frontend at 3929da2e, benchmark/sdpa_benchmark_training/results)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a job communicates, as its flags say."""

    userbuffers: bool = False
    """tp_comm_overlap: gathers and scatters of tensor parallel products run beside the product, but
    for the first of as many parts as there are ranks."""
    expert_alltoall: bool = False
    """overlap_moe_expert_parallel_comm: all-to-alls run beside another microbatch's arithmetic."""
    spread: Spread | None = None
    """Of a token's copies with the flex dispatcher, whose kernels (DeepEP, HybridEP) send it once
    to every domain that one of them is for; None: the alltoall dispatcher sends all copies."""
    used: float = 1.0
    """Share of experts' rows that tokens take: kernels skip room that is left over."""


Reading = NDArray[np.float64]
"""Seconds of modelled work so far, of what runs side by side: kernels, the host, all-to-alls."""


class Roofline(TorchDispatchMode):
    """Adds up the modelled time and the floating-point operations of everything in its block."""

    def __init__(
        self, device: Device, efficiency: Efficiency, traffic: Traffic | None = None
    ) -> None:
        super().__init__()
        self.device, self.efficiency = device, efficiency
        self.traffic = traffic or Traffic()
        self.links = Links(device, efficiency)
        self.seconds = self.host_seconds = self.alltoall_seconds = 0.0
        self.exposed_seconds = 0.0
        """The part of `seconds` in which a collective alone runs."""
        self.flops = 0
        self.started_seconds = 0.0
        """Seconds of collectives that the next product will run beside."""
        self._room = 0.0  # seconds of the last product that no collective ran beside yet

    def now(self) -> Reading:
        """A reading of the modelled clocks."""
        return np.array([self.seconds, self.host_seconds, self.alltoall_seconds])

    def settled(self) -> Reading:
        """The reading when all that was started has ended; nothing more will run beside it."""
        self._expose(self.started_seconds)
        self.started_seconds = self._room = 0.0
        return self.now()

    def ms_between(self, begin: Reading, end: Reading) -> float:
        """Milliseconds of modelled work between two readings of `now`: of the slowest."""
        return 1e3 * float(max(end - begin))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if func.namespace == "c10d":
            self._add_collective(func, name, args)
            return result
        python = func.namespace == ops.NAMESPACE and name not in ops.OF_TORCH
        reached = self.efficiency
        count = args[0] if func is ops.host_operations.default else 1
        self.host_seconds += 1e-6 * count * (reached.module_us if python else reached.host_us)
        if name not in ops.OF_HOST and "empty" not in name:
            self._add_kernel(func, name, args, kwargs or {}, result)
        return result

    def _add_kernel(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        inputs, outputs = _storages((args, tuple(kwargs.values()))), _storages(result)
        if not func._schema.is_mutable and outputs and set(outputs) <= set(inputs):
            return  # a view
        moved_bytes = _moved_bytes(name, args, kwargs, inputs, outputs)
        seconds = moved_bytes / (self.device.bandwidth_bytes * self.efficiency.bandwidth)
        flops = self._flops(func, name, args, kwargs, result)
        if flops:
            self.flops += flops
            seconds = max(seconds, flops / self._rate(name, args))
        seconds += self.efficiency.kernel_us * 1e-6
        if flops:
            self._room = max(0.0, seconds - self.started_seconds)
            self._expose(max(0.0, self.started_seconds - seconds))
            self.started_seconds = 0.0
        self.seconds += seconds

    def _rate(self, name: str, args: Any) -> float:
        """FLOP/s of an operation."""
        reached = self.efficiency
        precision = next((a for a in args if isinstance(a, str) and a in _PRECISIONS), "bf16")
        if "attention" in name:
            backward = name.endswith("backward")
            share = reached.attention_backward if backward else reached.attention
            share *= self._filled_by_attention(args)
        else:
            share = reached.gemm if precision == "bf16" else reached.gemm_quantised
            share *= self._filled(name, args)
        return self.device.rate(precision) * share

    def _filled(self, name: str, args: Any) -> float:
        """Share of a product's rate that a grouped product reaches with the rows of one expert."""
        weight = _experts(name, args)
        if weight is None:
            return 1.0
        rows = self.traffic.used * args[0].shape[0] / weight.shape[0]
        gradient = name == "gemm_weight_gradient"
        half = self.efficiency.half_rows_gradient if gradient else self.efficiency.half_rows
        return rows / (rows + half)

    def _filled_by_attention(self, args: Any) -> float:
        """Share of attention's rate that narrow heads and a window leave."""
        capability, width, window = self.device.capability, args[0].shape[3], args[-1]
        share = NARROW.get(capability, 1.0) if width <= _NARROW_WIDTH else 1.0
        return share * (window / (window + BESIDE_WINDOW.get(capability, 0)) if window else 1.0)

    def _flops(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        if func.namespace == ops.NAMESPACE:
            used = 1.0 if _experts(name, args) is None else self.traffic.used
            return round(used * ops.FLOPS[name](*args)) if name in ops.FLOPS else 0
        count = flop_registry.get(func.overloadpacket)
        return int(count(*args, **kwargs, out_val=result)) if count else 0

    def _add_collective(self, func: Any, name: str, args: Any) -> None:
        ranks = _ranks(args)
        if len(ranks) < 2:
            return
        reached = self.efficiency
        self.host_seconds += 1e-6 * (reached.exchange_us if name == RING else reached.host_us)
        # The largest tensor is everything that the group exchanges.
        whole_bytes = max(_storages(args).values(), default=0)
        spread = self.traffic.spread if name == ALLTOALL else None
        used = self.traffic.used if spread else 1.0
        seconds = self.links.seconds(name, round(used * whole_bytes), ranks, spread)
        if name == ALLTOALL and self.traffic.expert_alltoall:
            self.alltoall_seconds += seconds
            self.seconds += 0.0 if spread else TAKEN_BY_NCCL * seconds
        elif name == RING or _argument(func, args, _ASYNC):
            self.started_seconds += seconds
        elif name in _SPLIT and self.traffic.userbuffers:
            self.beside_product(name, seconds, len(ranks))
        else:
            self._expose(seconds)

    def _expose(self, seconds: float) -> None:
        self.seconds += seconds
        self.exposed_seconds += seconds

    def beside_product(self, name: str, seconds: float, ranks: int) -> None:
        """A gather beside the product that follows, a scatter beside the one before."""
        first = seconds / ranks
        self._expose(first)
        rest = seconds - first
        if name == "_allgather_base_":
            self.started_seconds += rest
        else:
            self._expose(max(0.0, rest - self._room))
            self._room = max(0.0, self._room - rest)


class Communication(Roofline):
    """Adds up the modelled time of collectives alone, as far as arithmetic does not hide them."""

    def now(self) -> Reading:
        """A reading of the modelled clocks."""
        return np.array([self.exposed_seconds, 0.0, 0.0])


_PICKED = ("index", "index_select", "gather", "embedding")
"""Operations that read as much of their first operand as they return."""
_PUT = {"index_put_": 2, "index_add_": 3, "scatter_": 3, "scatter_add_": 3}
"""Operations that read and write as much of their first operand as they are given; by name the
place of what is given."""


def _moved_bytes(
    name: str, args: Any, kwargs: dict[str, Any], inputs: dict[int, int], outputs: dict[int, int]
) -> int:
    """Bytes that an operation reads and writes of its operands, without what it leaves alone."""
    written = sum(outputs.values())
    if name in _PICKED:
        moved = 2 * written
    elif name in _PUT and isinstance(args[_PUT[name]], torch.Tensor):
        moved = 2 * sum(_storages(args[_PUT[name]]).values())
    elif name == "baddbmm" and kwargs.get("beta") == 0:
        moved = written
    else:
        return sum(inputs.values()) + written
    return moved + sum(inputs[key] for key in inputs.keys() - _storages(args[:1]))


def _experts(name: str, args: Any) -> torch.Tensor | None:
    """The weights [experts, out, in] of a grouped product; None of any other operation."""
    weight = next((a for a in args if isinstance(a, torch.Tensor) and a.dim() == 3), None)
    grouped = weight is not None and name.startswith("gemm") and args[0].dim() != 3
    return weight if grouped else None


def _storages(operands: Any) -> dict[int, int]:
    """The most bytes that one of the tensors spans in each storage; tree_iter would take a third of
    a profile's time."""
    found: dict[int, int] = {}
    left = [operands]
    while left:
        operand = left.pop()
        if isinstance(operand, torch.Tensor):
            storage = operand.untyped_storage()
            spanned = min(operand.numel() * operand.element_size(), storage.nbytes())
            found[storage._cdata] = max(found.get(storage._cdata, 0), spanned)
        elif isinstance(operand, (list, tuple)):
            left += operand
    return found


def _argument(func: Any, args: Any, name: str) -> Any:
    """A positional argument of an operation by its name; None if it has none."""
    names = [argument.name for argument in func._schema.arguments[: len(args)]]
    return args[names.index(name)] if name in names else None


def _ranks(args: Any) -> list[int]:
    """The ranks of a collective's group."""
    for argument in tree_iter(args):
        if isinstance(argument, torch.ScriptObject):
            try:
                group = torch.distributed.ProcessGroup.unbox(argument)
            except RuntimeError:  # the reduction's ScriptObject, not the group's
                continue
            return torch.distributed.get_process_group_ranks(group)
    return [0]
