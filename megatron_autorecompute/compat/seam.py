"""Where Megatron runs a block's full recompute, and how a block is made to run its policy there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_autorecompute.compat import versions
from megatron_autorecompute.compat.untyped import Block
from megatron_autorecompute.errors import UnsupportedVersionError

_METHOD, _FUNCTION = "_checkpointed_forward", "checkpointed_forward"
_RUNNER = "_autorecompute_runner"
"""Attribute in which a block keeps what it runs in place of Megatron's checkpointed forward."""
_MARK = "_autorecompute"
"""Marks a function that dispatches, as `integrations.megatron_lm` marks those in our patch."""


def is_method() -> bool:
    """Whether `_checkpointed_forward` is a method (through 0.17); since 0.18 it is a function."""
    return hasattr(TransformerBlock, _METHOD)


def _places(block: Block) -> list[tuple[Any, str]]:
    """Where a block finds its checkpointed forward: its class (through 0.17 every class has one;
    since 0.18 those that bring their own, as Qwen3-VL's in Megatron Bridge), or else the modules
    that import `megatron.core.recompute.checkpointed_forward` by name.

    Raises UnsupportedVersionError: Megatron has it in neither of the two known places.
    """
    for kind in type(block).__mro__:
        if _METHOD in vars(kind):
            return [(kind, _METHOD)]
    if not hasattr(transformer_block, _FUNCTION):
        raise UnsupportedVersionError(
            f"megatron-core {versions.installed()} has neither TransformerBlock.{_METHOD} nor "
            f"megatron.core.recompute.{_FUNCTION}; tested are {', '.join(versions.TESTED)}."
        )
    from megatron.core.models.hybrid import hybrid_block

    return [(transformer_block, _FUNCTION), (hybrid_block, _FUNCTION)]


def checkpointed_forward(block: Block) -> Callable[..., Any]:
    """Megatron's own checkpointed forward for `block`; it takes the block as first argument.

    Raises UnsupportedVersionError: as `_places`.
    """
    owner, name = _places(block)[0]
    found = getattr(owner, name)
    original: Callable[..., Any] = found.__wrapped__ if hasattr(found, _MARK) else found
    return original


def redirect(block: Block, run: Callable[..., Any]) -> None:
    """Make Megatron's full-recompute branch of this block, and of its copies, call `run`, a
    function of a module, with the block and what Megatron's checkpointed forward takes.

    Megatron's own functions are replaced for good; for any other block they do as before.
    """
    for owner, name in _places(block):
        original = getattr(owner, name)
        if not hasattr(original, _MARK):
            made = functools.wraps(original)(dispatching(original))
            setattr(made, _MARK, True)
            setattr(owner, name, made)
    block.__dict__[_RUNNER] = run


def restore(block: Block) -> None:
    """Undo `redirect` for a block."""
    block.__dict__.pop(_RUNNER, None)


def dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function, except that a block with a runner goes through the runner."""

    def checkpointed_forward(block: Block, *args: Any, **kwargs: Any) -> Any:
        return block.__dict__.get(_RUNNER, original)(block, *args, **kwargs)

    return checkpointed_forward
