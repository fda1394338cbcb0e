"""Attention under context parallelism: what is saved, and what is alive while it runs."""

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.attention import attend_in_parallel
from megatron_autorecompute.meta.devices import Efficiency
from megatron_autorecompute.meta.roofline import Roofline
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from tests.meta.test_no_device import (
    GROUPS,
    H100,
    HEADS,
    HIDDEN,
    SEQUENCE,
    UNIT,
    dense_held_bytes,
    records,
)

RANKS = 2
Q = 2 * UNIT // RANKS
LSE = 4 * HEADS * SEQUENCE // RANKS


def config_of(comm_type, ranks=RANKS):
    sizes = {"hierarchical_context_parallel_sizes": [2, ranks // 2]}
    fields = {"context_parallel_size": ranks, "cp_comm_type": comm_type}
    return fields | (sizes if comm_type == "a2a+p2p" else {})


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("comm_type", "more"),
    [("p2p", 0), (None, 0), ("a2a+p2p", 0), ("a2a", Q)],
)
def test_the_exchange_of_all_heads_saves_the_output_twice(comm_type, more):
    found = records(config_of(comm_type))
    assert found["none"].held_bytes == dense_held_bytes() / RANKS + more


def attention(comm_type, ranks, mode, read):
    """What `read` returns of a mode before forward and backward; of heads that have as many keys.
    `mode` takes query, key and value."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        size = (SEQUENCE // ranks, 1, HEADS, HIDDEN // HEADS)
        with torch.device("meta"):
            parts = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
        with mode(parts) as running:
            before = read(running)
            group = torch.distributed.group.WORLD
            out = attend_in_parallel(comm_type, parts, group, 0, None)
            between = read(running)
            out.backward(torch.empty_like(out))
    finally:
        torch.distributed.destroy_process_group()
    return before, between, read(running)


def ended_peak(live):
    live.mark("next")
    return live.spans()[-2].peak_bytes


def attention_peaks(comm_type, ranks):
    """Most bytes alive in forward and in backward."""
    return attention(comm_type, ranks, LiveBytes, ended_peak)[1:]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_holds_every_steps_keys_and_outputs(ranks):
    q, lse = 2 * UNIT / ranks, 4 * HEADS * SEQUENCE / ranks
    forward, backward = attention_peaks("p2p", ranks)
    assert forward == ranks * (2 * q + q + lse) + q + lse
    saved = 2 * q + q + lse  # k and v that came last, out; q is the caller's
    # dout; dq; twice k, v and their gradients; dq, dk and dv of one step.
    assert backward == saved + q + q + 8 * q + 3 * q


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_goes_on_once_less_forward_than_backward_where_gradients_return(ranks):
    clock = Roofline(H100, Efficiency(exchange_us=1e9))
    begin, forward, backward = attention("p2p", ranks, lambda _: clock, Roofline.now)
    assert clock.ms_between(begin, forward) == pytest.approx(1e6 * (ranks - 1))
    assert clock.ms_between(forward, backward) == pytest.approx(1e6 * ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanging_heads_needs_copies_and_not_more_with_more_ranks(ranks):
    q, lse = 2 * UNIT / ranks, 4 * HEADS * SEQUENCE / ranks
    forward, backward = attention_peaks("a2a", ranks)
    # q, k, v and out after the exchange; out in order, arrived, and as it is returned.
    assert forward == 4 * q + lse + 3 * q
    saved = 5 * q + lse  # and the output of the caller
    # dout as it came and exchanged; dq, dk and dv as computed, in order and arrived, and one of
    # them as it is returned.
    assert backward == saved + 2 * q + 3 * 3 * q + q


def test_an_exchange_of_more_heads_than_there_are_is_refused():
    assert GROUPS % RANKS == 0
    with pytest.raises(OptionError, match="Megatron cannot run this model"):
        records({"cp_comm_type": "a2a", "context_parallel_size": 4})
