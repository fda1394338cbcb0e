"""Where Megatron runs a block's full recompute, and how a block is made to run its policy there."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_autorecompute.compat import versions
from megatron_autorecompute.compat.untyped import Block
from megatron_autorecompute.errors import ApplyError, UnsupportedVersionError


def is_method() -> bool:
    """Whether `_checkpointed_forward` is a method (through 0.17); since 0.18 it is a function."""
    return hasattr(TransformerBlock, "_checkpointed_forward")


def _own_method(block: Block) -> Callable[..., Any] | None:
    """The checkpointed forward of the block's class: through 0.17 every class has one; since 0.18
    those that bring their own with a forward that calls it (Qwen3-VL in Megatron Bridge)."""
    return getattr(type(block), "_checkpointed_forward", None)


def _seam_modules() -> list[Any]:
    """Modules that import `megatron.core.recompute.checkpointed_forward` by name (since 0.18)."""
    modules: list[Any] = [transformer_block]
    try:
        from megatron.core.models.hybrid import hybrid_block
    except ImportError:  # HybridStack came with 0.18
        return modules
    return [*modules, hybrid_block]


def checkpointed_forward(block: Block) -> Callable[..., Any]:
    """Megatron's own checkpointed forward for `block`; it takes the block as first argument.

    Raises:
        UnsupportedVersionError: Megatron has it in neither of the two known places.
    """
    method: Callable[..., Any] | None = _own_method(block)
    if method is not None:
        return method
    try:
        from megatron.core.recompute import checkpointed_forward as function
    except ImportError as error:
        raise UnsupportedVersionError(
            f"megatron-core {versions.installed()} has neither "
            "TransformerBlock._checkpointed_forward nor "
            "megatron.core.recompute.checkpointed_forward; tested are "
            f"{', '.join(versions.TESTED)}."
        ) from error
    megatrons: Callable[..., Any] = inspect.unwrap(_originals.get(transformer_block, function))
    return megatrons


_RUNNER = "_autorecompute_runner"
_originals: dict[Any, Callable[..., Any]] = {}
_runners: set[weakref.ref[Runner]] = set()
"""Runners that are alive. While there are any, Megatron's functions are replaced."""


class Runner:
    """What a block runs in Megatron's full-recompute branch; a copy of the block has a copy of it.

    Args:
        run: takes the block, `held`, and what Megatron's checkpointed forward takes.
        held: what `run` needs besides; it may refer to the block only through objects that are
            copied and pickled with it.
    """

    def __init__(self, run: Callable[..., Any], held: Any) -> None:
        self.run, self.held = run, held
        if not is_method():
            _ask_for_runners()
            _runners.add(weakref.ref(self, _let_go))

    def __reduce__(self) -> tuple[Any, ...]:
        return Runner, (self.run, self.held)


class _OfBlock:
    """Replaces the method in a block that has one, with a weak reference to the block."""

    def __init__(self, block: Block, runner: Runner) -> None:
        self.block, self.runner = weakref.ref(block), runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block()
        if block is None:
            raise ApplyError("A copy.copy of a block outlived the block: use copy.deepcopy.")
        return self.runner.run(block, self.runner.held, *args, **kwargs)

    def __getstate__(self) -> Any:
        return self.block(), self.runner

    def __setstate__(self, state: Any) -> None:
        block, self.runner = state
        self.block = weakref.ref(block)


def redirect(block: Block, runner: Runner) -> None:
    """Make Megatron's full-recompute branch of this block, and of its copies, call `runner`."""
    if _own_method(block) is not None:
        block._checkpointed_forward = _OfBlock(block, runner)
    else:
        block.__dict__[_RUNNER] = runner


def restore(block: Block) -> None:
    """Undo `redirect`; when no runner is alive any more, Megatron's functions are restored."""
    block.__dict__.pop("_checkpointed_forward", None)
    block.__dict__.pop(_RUNNER, None)


def _ask_for_runners() -> None:
    if not _originals and not _sources_dispatch():
        for module in _seam_modules():
            _originals[module] = module.checkpointed_forward
            module.checkpointed_forward = dispatching(_originals[module])


def _let_go(runner: weakref.ref[Runner]) -> None:
    _runners.discard(runner)
    if not _runners:
        for module, original in _originals.items():
            module.checkpointed_forward = original
        _originals.clear()


def dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function, except that a block with a runner goes through the runner."""

    def checkpointed_forward(block: Block, *args: Any, **kwargs: Any) -> Any:
        runner = block.__dict__.get(_RUNNER)
        if runner is None:
            return original(block, *args, **kwargs)
        return runner.run(block, runner.held, *args, **kwargs)

    return checkpointed_forward


def _sources_dispatch() -> bool:
    """Whether Megatron's sources have our patch, which decorates the function where it is."""
    return hasattr(transformer_block.checkpointed_forward, "__wrapped__")
