"""Models the time of every operation by a roofline, in a dispatch mode over meta tensors.

An operation takes max(FLOPs / rate, bytes read and written / bandwidth); a collective takes its
bytes over the bandwidth of its group's link. Not modelled: launch latency, overlap of communication
with arithmetic (none is assumed), caches, and the dependence of rates on shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.devices import Device, Efficiency

_PRECISIONS = ("bf16", "fp8", "fp4")


class Roofline(TorchDispatchMode):
    """Adds up the modelled time and the floating-point operations of everything in its block."""

    def __init__(self, device: Device, efficiency: Efficiency) -> None:
        super().__init__()
        self.device, self.efficiency = device, efficiency
        self.seconds = 0.0
        self.flops = 0

    def now(self) -> float:
        """Seconds of modelled work so far."""
        return self.seconds

    def ms_between(self, begin: float, end: float) -> float:
        """Milliseconds of modelled work between two readings of `now`."""
        return (end - begin) * 1e3

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
            self.seconds += self._collective_seconds(name, args)
        elif "empty" not in name:
            self.seconds += self._kernel_seconds(func, name, args, kwargs or {}, result)
        return result

    def _kernel_seconds(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any
    ) -> float:
        inputs, outputs = _storages((args, tuple(kwargs.values()))), _storages(result)
        if not func._schema.is_mutable and outputs and set(outputs) <= set(inputs):
            return 0.0  # a view
        moved_bytes = sum(inputs.values()) + sum(outputs.values())
        moving = moved_bytes / (self.device.bandwidth_bytes * self.efficiency.bandwidth)
        flops = self._flops(func, name, args, kwargs, result)
        if not flops:
            return moving
        self.flops += flops
        share = self.efficiency.attention if "attention" in name else self.efficiency.gemm
        precision = next((a for a in args if isinstance(a, str) and a in _PRECISIONS), "bf16")
        return max(moving, flops / (self.device.rate(precision) * share))

    def _flops(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
        if func.namespace == "megatron_autorecompute":
            return ops.FLOPS[name](*args) if name in ops.FLOPS else 0
        count = flop_registry.get(func.overloadpacket)
        return int(count(*args, **kwargs, out_val=result)) if count else 0

    def _collective_seconds(self, name: str, args: Any) -> float:
        ranks = _group_size(args)
        if ranks < 2:
            return 0.0
        # The largest tensor is everything that the group exchanges.
        whole_bytes = max(_storages(args).values(), default=0)
        times = 2 if name.startswith("allreduce") else 1
        within = ranks <= self.device.link_domain
        rate = self.device.link_bytes if within else self.device.network_bytes
        moved_bytes = times * whole_bytes * (ranks - 1) / ranks
        return moved_bytes / (rate * self.efficiency.communication)


class Communication(Roofline):
    """Adds up the modelled time of collectives alone."""

    def _kernel_seconds(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any
    ) -> float:
        return 0.0


def _storages(operands: Any) -> dict[int, int]:
    """By storage, the most bytes that one of the tensors spans in it."""
    found: dict[int, int] = {}
    for tensor in _tensors(operands):
        storage = tensor.untyped_storage()
        spanned = min(tensor.numel() * tensor.element_size(), storage.nbytes())
        found[storage._cdata] = max(found.get(storage._cdata, 0), spanned)
    return found


def _tensors(operands: Any) -> Iterator[torch.Tensor]:
    """Tensors among an operation's operands, which are tensors, numbers, names and lists of them.
    tree_iter handles any structure, but would take a third of a profile's time."""
    if isinstance(operands, torch.Tensor):
        yield operands
    elif isinstance(operands, (list, tuple)):
        for operand in operands:
            yield from _tensors(operand)


def _group_size(args: Any) -> int:
    for argument in tree_iter(args):
        if isinstance(argument, torch.ScriptObject):
            try:
                return int(torch.distributed.ProcessGroup.unbox(argument).size())
            except RuntimeError:  # the reduction's ScriptObject, not the group's
                continue
    return 1
