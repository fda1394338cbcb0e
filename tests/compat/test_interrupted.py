"""What an exception in the middle of a step leaves behind in Megatron."""

import gc

import pytest
import torch

from megatron_autorecompute.compat import checkpoints
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from tests.support import microbatch, tiny_config, tiny_gpt

pytestmark = pytest.mark.usefixtures("one_rank")


def test_an_interrupted_step_is_freed_though_layers_keep_their_checkpoints():
    config = tiny_config(recompute_granularity="selective", recompute_modules=["layernorm"])
    chunks, batch = tiny_gpt(config), microbatch()
    last = chunks[0].decoder.layers[-1]

    def out_of_memory(*_):
        raise torch.OutOfMemoryError

    with LiveBytes([*chunks[0].parameters(), *batch.values()]) as live:
        handle = last.register_forward_pre_hook(out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            chunks[0](**batch)
        handle.remove()
        gc.collect()
        left_behind = live.current_bytes
        checkpoints.leave_interrupted(chunks)
        gc.collect()
        assert left_behind > 10 * live.current_bytes
