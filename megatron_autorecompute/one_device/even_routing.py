"""Makes a router give every expert equally many tokens, whatever its weights say.

Under the fake process group all other ranks' tokens are copies of this rank's, so no routing would
be a real one. A token goes to the next top-k experts in turn, as in a meta step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.patched import patched

_FAVOUR = 100.0
"""Added to the chosen experts' logits, which are kept within +-10."""


@contextmanager
def even_routing() -> Iterator[None]:
    """In this block Megatron's routers choose evenly.

    Logits are changed in place and out of autograd's sight, so that nothing else is kept than in a
    job. Scores, losses and permutation are Megatron's own.
    """
    from megatron.core.transformer.moe import router
    from megatron.core.transformer.moe.router import Router

    original = Router.gating

    @functools.wraps(original)
    def gating(self: Any, input: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(self, input)
        favour = _favour(logits.numel() // self.num_experts, self.num_experts, self.topk, logits)
        # What is no number would be chosen first, for all tokens alike.
        logits.data.nan_to_num_(0.0, 0.0, 0.0).clamp_(-10, 10).add_(favour.view_as(logits))
        return logits

    made: dict[Any, torch.Tensor] = {}

    def _favour(tokens: int, experts: int, topk: int, like: torch.Tensor) -> torch.Tensor:
        key = (tokens, experts, topk, like.dtype, like.device)
        if key not in made:
            chosen = torch.arange(tokens * topk, device=like.device) % experts
            made[key] = like.new_zeros(tokens, experts).scatter_(
                1, chosen.view(tokens, topk), _FAVOUR
            )
        return made[key]

    def forced(logits: torch.Tensor) -> torch.Tensor:
        """Logits in place of random ones, which balance in the mean only; equally large."""
        return logits.clone()

    with patched(Router, "gating", gating), patched(router, "apply_random_logits", forced):
        yield


@contextmanager
def checked(model: torch.nn.Module) -> Iterator[None]:
    """In this block a router that does not choose evenly is found.

    Raises ProfileError, as for `sinkhorn` and for groups of experts that are too narrow.
    """
    from megatron.core.transformer.moe.router import Router

    def check(_: Any, __: Any, output: Sequence[torch.Tensor]) -> None:
        counts = output[1].sum(0)
        least, most = int(counts.min()), int(counts.max())
        if most - least > 1:
            raise ProfileError(
                "This router's settings do not let every expert have equally many tokens: they got "
                f"{least} to {most}. Measure such a model in the job, by auto."
            )

    routers = [module for module in model.modules() if isinstance(module, Router)]
    with ExitStack() as undo:
        for router in routers:
            undo.callback(router.register_forward_hook(check).remove)
        yield
