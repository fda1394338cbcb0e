"""Linears with a fused norm whose output is not kept: the norm runs again in the backward.

Transformer Engine's `_LayerNormLinear` saves its input, its parameters, statistics and the output
of the norm. The last one is dropped right after forward, and made again from the input, which the
node keeps anyway, by the kernel of the forward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch

from megatron_autorecompute.compat.layer_parts import normed_again
from megatron_autorecompute.errors import ApplyError
from megatron_autorecompute.runtime.run_once import put_back
from megatron_autorecompute.runtime.saved import is_looked_at, saved


class NormAgain:
    """Stands in for the forward of a linear with a fused norm, until `undo`."""

    def __init__(self, linear: torch.nn.Module) -> None:
        self.before = vars(linear).get("forward")
        self._linear = weakref.ref(linear)
        linear.forward = self

    def undo(self) -> None:
        """Put the forward back."""
        put_back(self._linear(), "forward", self)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and drop the norm's output.

        Raises ApplyError: it cannot be told from what else was saved.
        """
        linear: Any = self._linear()
        forward = self.before or functools.partial(type(linear).forward, linear)
        x = x.contiguous()  # as the module does first; it saves this
        outputs = forward(x, *args, **kwargs)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        # A frozen weight needs no input: nothing is saved.
        if torch.is_grad_enabled() and first.requires_grad and linear.weight.requires_grad:
            _drop(linear, x, first.grad_fn)
        return outputs

    def __getstate__(self) -> Any:
        return {**vars(self), "_linear": self._linear()}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self._linear = weakref.ref(state["_linear"])


def _drop(linear: Any, x: torch.Tensor, node: Any) -> None:
    known = {_storage(each) for each in (x, *linear.parameters())}
    handles = []
    nodes, seen = [node], {None, x.grad_fn}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [after for after, _ in node.next_functions]
            handles += [
                (handle, each.size())
                for handle, each in saved(node)
                if each.dtype == x.dtype
                and each.shape[-1:] == x.shape[-1:]
                and each.numel() == x.numel()
                and _storage(each) not in known
            ]
    if len(handles) != 1:
        raise ApplyError(
            f"ln_out: {type(linear).__name__} saved {len(handles)} tensors that may be the output "
            "of its norm, and not one. Leave ln_out out of the policy."
        )
    handle, size = handles[0]
    again = functools.partial(_again, linear, x.detach(), size)
    # Somebody else's hooks may be on what is saved, which can have no others: it stays.
    with contextlib.suppress(RuntimeError):
        handle.register_hooks(lambda _: None, again)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _again(linear: Any, x: torch.Tensor, size: Any, _: None) -> torch.Tensor:
    if is_looked_at():
        return x.new_empty(0)
    with torch.no_grad():
        return normed_again(linear, x).view(size)
