"""Code besides Megatron's that sees what flows through a layer: forward hooks, and forwards that
others wrote.

A result that nothing reads through autograd's graph is not computed again, and NaN stands in its
place. Such code may look at values outside the graph: a hook that clips, a forward that branches.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

KNOWN = ("megatron", "megatron_autorecompute", "transformer_engine", "torch", "apex", "mamba_ssm")
"""Packages whose code in layers acts on no value outside autograd's graph."""


class Onlookers:
    """What may look at the output of a function in a layer, which a checkpoint runs; `owner` is the
    module or object whose function it is."""

    def __init__(self, layer: torch.nn.Module, owner: Any) -> None:
        around = list(_around(layer, owner))
        # Weak, so that a layer is freed when nobody else holds it.
        self._modules = list(map(weakref.ref, layer.modules()))
        self._passed = list(map(weakref.ref, around))
        self._inside = self._snapshot()
        self.parameters = list(layer.parameters())
        """The parameters of the layer."""
        self._hooks = [
            (own, type(module).__name__)
            for module in layer.modules()
            for own in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._foreign = next((of for module in around for of in _written_for(module)), None)

    def are_of_another_layer(self) -> bool:
        """Whether a module or parameter was added, taken out or replaced since, or a forward."""
        return self._inside != self._snapshot()

    def first(self) -> str | None:
        """Who looks, in words; None if nobody does."""
        hooks = torch.nn.modules.module
        for every in (hooks._global_forward_hooks, hooks._global_forward_pre_hooks):
            for hook in every.values():
                if not _is_known(hook):
                    return f"the hook {_name(hook)} on all modules"
        for own, module in self._hooks:
            for hook in own.values():
                if not _is_known(hook):
                    return f"the hook {_name(hook)} on {module}"
        return self._foreign

    def _snapshot(self) -> list[int]:
        found = []
        for reference in self._passed:
            found.append(id(getattr(reference(), "__dict__", {}).get("forward")))
        for reference in self._modules:
            module = reference()
            if module is None:  # replaced, perhaps by one at the same address
                return []
            found += map(id, module._modules.values())
            found += map(id, module._parameters.values())
        return found


onlookers_of: Callable[[torch.nn.Module, Any], Onlookers] = torch.compiler.disable(Onlookers)
"""Makes them where torch.compile does not trace: they look into functions."""


def _around(layer: torch.nn.Module, owner: Any) -> Iterator[torch.nn.Module]:
    """The modules whose forward calls a function of the owner, directly or not."""
    for module in layer.modules():
        if module is not owner and any(_holds(inner, owner) for inner in module.modules()):
            yield module


def _holds(module: torch.nn.Module, owner: Any) -> bool:
    return module is owner or any(value is owner for value in vars(module).values())


def _written_for(module: torch.nn.Module) -> Iterator[str]:
    """What others wrote of a module's forward and of the functions that it was given."""
    name = type(module).__name__
    if not _is_known(type(module).forward):
        yield f"the forward of {name}"
    for attribute, value in vars(module).items():
        if isinstance(value, types.FunctionType | types.MethodType) and not _is_known(value):
            yield f"{attribute} of {name}"


def _is_known(function: Callable[..., Any]) -> bool:
    return _module(function).partition(".")[0] in KNOWN


def _name(hook: Any) -> str:
    return f"{_module(hook)}.{getattr(_unwrapped(hook), '__name__', type(hook).__name__)}"


def _module(function: Any) -> str:
    function = _unwrapped(function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
