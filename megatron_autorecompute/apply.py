"""Public home of `apply`, `in_force` and `blocks`.

The module itself is callable, because importing it binds the package's name `apply` to it.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_autorecompute.runtime.apply import AppliedPolicy, Given, apply, blocks, in_force

__all__ = ["AppliedPolicy", "apply", "blocks", "in_force"]


class _Callable(ModuleType):
    def __call__(
        self, policy: Given, model: torch.nn.Module | Sequence[torch.nn.Module], **options: Any
    ) -> AppliedPolicy:
        """Run the function `apply`."""
        return apply(policy, model, **options)


sys.modules[__name__].__class__ = _Callable
