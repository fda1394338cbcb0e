"""A loop shaped like slime's, which `slime_hook` attaches to: but for the end of this file, nothing
here knows of it.

`train_one_step` stands for the function of that name in slime/backends/megatron_utils/model.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from examples.loops.small_gpt import (
    MAX_TOKENS,
    SmallGPT,
    get_forward_backward_func,
    started,
)


def train_one_step(
    args: Any, rollout_id: int, step_id: int, microbatches: Sequence[Any], gpt: SmallGPT
) -> list[float]:
    """Forward, backward and update; the losses."""
    gpt.zero_grad()
    if args.before_train_step_hook is not None:
        args.before_train_step_hook(args, rollout_id, step_id, gpt.chunks, gpt.optimizer, None)
    forward_backward_func = get_forward_backward_func()
    losses = gpt.call(microbatches, forward_backward_func)
    gpt.optimizer.step()
    return [float(each["loss"]) for each in losses]


def forward_only(microbatches: Sequence[Any], gpt: SmallGPT) -> list[float]:
    """Log-probs."""
    with torch.no_grad():
        found = gpt.call(microbatches, get_forward_backward_func(), forward_only=True)
    return [float(each["loss"]) for each in found]


def train(
    rollouts: int, hook: Callable[..., None] | None, budget_gib: float | None = None
) -> tuple[list[float], SmallGPT]:
    """Two steps after each rollout, of other lengths."""
    args = SimpleNamespace(
        before_train_step_hook=hook,
        max_tokens_per_gpu=MAX_TOKENS,
        recompute_memory_budget_gib=budget_gib,
    )
    gpt, losses, lengths = SmallGPT(), [], random.Random(0)
    for rollout in range(rollouts):
        tokens = [lengths.randint(24, MAX_TOKENS) for _ in range(5)]
        microbatches = gpt.microbatches(tokens, seed=rollout)
        losses += forward_only(microbatches, gpt)
        for step, part in enumerate((microbatches[:3], microbatches[3:])):
            losses += train_one_step(args, rollout, step, part, gpt)
    return losses, gpt


if __name__ == "__main__":
    from examples.loops import slime_hook
    from examples.loops.bare import BUDGET_GIB

    slime_hook.MODULES = (__name__,)
    with started():
        _, gpt = train(12, slime_hook.before_train_step, BUDGET_GIB)
        auto = slime_hook.attached(gpt.chunks)
        print(auto.report())
        auto.close()
