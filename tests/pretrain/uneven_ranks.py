"""Runs first in a rank: rank 1's layers hold more than rank 0's, and rank 1 fails once for memory.

Both ranks are of one tensor-parallel group, whose collectives no rank may leave alone.
"""

import os

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args

MORE_BYTES = 1 << 18
FAILS_IN_STEP = 8
"""Counted from 0: four steps measure, and the plan stands since step 7 at the latest."""


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states):
        ctx.save_for_backward(torch.empty(MORE_BYTES, dtype=torch.uint8))
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


original = TransformerLayer.forward


def forward(self, hidden_states, *args, **kwargs):
    if get_args().curr_iteration == FAILS_IN_STEP:
        raise torch.OutOfMemoryError("this rank's memory is used up")
    return original(self, Holding.apply(hidden_states), *args, **kwargs)


if os.environ["RANK"] == "1":
    TransformerLayer.forward = forward
