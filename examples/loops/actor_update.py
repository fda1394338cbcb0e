"""A loop shaped like verl's actor update: log-prob pass, several optimizer steps, then asleep.

`Engine` stands for `MegatronEngine` in verl/workers/engine/megatron/transformer_impl.py, and its
methods for those of the same names. Between updates an inference engine needs the device:
parameters, gradients and the optimizer's state go to the host, and their storages are resized to
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from examples.loops.small_gpt import MAX_TOKENS, SmallGPT, get_forward_backward_func, started
from megatron_autorecompute import attach

BUDGET_GIB = 0.0124
"""Between what the leanest policy and none need."""


class Engine:
    """Model, optimizer, and what the worker calls."""

    def __init__(self, with_auto: bool = True) -> None:
        self.gpt, self.auto = SmallGPT(), None
        self.module, self.optimizer = self.gpt.chunks, self.gpt.optimizer
        if with_auto:  # in verl at the end of `initialize`, behind `_build_optimizer`
            self.auto = attach(
                self.module, self.optimizer, max_tokens=MAX_TOKENS, budget_gib=BUDGET_GIB
            )
        self._asleep: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward_backward_batch(
        self, micro_batches: Sequence[dict[str, torch.Tensor]], forward_only: bool
    ) -> list[float]:
        """The losses of all microbatches; without forward_only also gradients."""
        forward_backward_func = get_forward_backward_func()
        if self.auto is not None:
            forward_backward_func = self.auto.schedule(forward_backward_func)
            if not forward_only:
                self.auto.tokens([each["input_ids"].shape[1] for each in micro_batches])
        with torch.set_grad_enabled(not forward_only):
            found = self.gpt.call(micro_batches, forward_backward_func, forward_only=forward_only)
        return [float(each["loss"]) for each in found]

    def sleep(self) -> None:
        """Give parameters, gradients and optimizer state back to the device."""
        for tensor in self._tensors():
            self._asleep.append((tensor, tensor.to("cpu", copy=True)))
            tensor.untyped_storage().resize_(0)

    def wake_up(self) -> None:
        """Take them again."""
        for tensor, on_host in self._asleep:
            tensor.untyped_storage().resize_(on_host.untyped_storage().nbytes())
            tensor.copy_(on_host)
        self._asleep.clear()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self.module:
            yield from (parameter.data for parameter in chunk.parameters())
            for buffer in chunk.buffers:  # type: ignore[union-attr]
                yield buffer.grad_data
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for state in part.optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor) and v.dim())


def train(rollouts: int, with_auto: bool = True) -> tuple[list[float], Any]:
    """Roll out, log-probs, two mini-batches of updates, sleep; the losses, and the auto."""
    engine, losses, lengths = Engine(with_auto), [], random.Random(0)
    for rollout in range(rollouts):
        tokens = [lengths.randint(24, MAX_TOKENS) for _ in range(6)]
        batches = engine.gpt.microbatches(tokens, seed=rollout)
        engine.wake_up()
        losses += engine.forward_backward_batch(batches, forward_only=True)
        for mini_batch in (batches[:4], batches[4:]):
            engine.gpt.zero_grad()
            losses += engine.forward_backward_batch(mini_batch, forward_only=False)
            engine.optimizer.step()
        engine.sleep()
    return losses, engine.auto


if __name__ == "__main__":
    with started():
        _, auto = train(12)
        print(auto.report())
        auto.close()
