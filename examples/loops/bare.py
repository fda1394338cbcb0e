"""A bare loop over Megatron-Core's schedule, with `attach`: three lines, marked.

torchrun --nproc-per-node 1 -m examples.loops.bare
"""

from __future__ import annotations

import random

from examples.loops.small_gpt import MAX_TOKENS, SmallGPT, get_forward_backward_func, started
from megatron_autorecompute import attach

BUDGET_GIB = 0.0124
"""Between what the leanest policy and none need."""


def train(updates: int, with_auto: bool = True) -> list[float]:
    """Train on packed microbatches of random lengths; the loss of every microbatch."""
    gpt, losses, lengths = SmallGPT(), [], random.Random(0)
    forward_backward = get_forward_backward_func()
    if with_auto:
        auto = attach(gpt.chunks, gpt.optimizer, max_tokens=MAX_TOKENS, budget_gib=BUDGET_GIB)  # 1
        forward_backward = auto.schedule(forward_backward)  # 2
    for update in range(updates):
        tokens = [lengths.randint(24, MAX_TOKENS) for _ in range(lengths.randint(2, 4))]
        microbatches = gpt.microbatches(tokens, seed=update)
        gpt.zero_grad()
        if with_auto:
            auto.tokens(tokens)  # 3
        losses += [float(each["loss"]) for each in gpt.call(microbatches, forward_backward)]
        gpt.optimizer.step()
    if with_auto:
        print(auto.report())
        auto.close()
    return losses


if __name__ == "__main__":
    with started():
        train(30)
