"""Live bytes against sizes known by arithmetic."""

import pytest
import torch

from megatron_autorecompute.runtime.live_bytes import LiveBytes, count_once

pytestmark = pytest.mark.any_version

KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def test_peak_is_what_lives_at_once_and_current_what_is_left():
    with LiveBytes() as live:
        first = kib(3)
        second = kib(5)
        del first
        third = kib(1)
        assert live.current_bytes == 6 * KIB
    assert live.peak_bytes == 8 * KIB
    del second, third
    assert live.current_bytes == 0


def test_views_cost_nothing_and_keep_their_storage_alive():
    with LiveBytes() as live:
        view = kib(4)[:8].view(2, 4)
        assert live.current_bytes == 4 * KIB
        del view
        assert live.current_bytes == 0


def test_static_tensors_and_their_views_are_not_counted():
    weight = kib(4)
    with LiveBytes(static=[weight]) as live:
        kept = [weight[:10], weight.view(2, -1), weight + 1]
        assert live.current_bytes == 4 * KIB
        live.exclude(kept[2])
        assert live.current_bytes == 0


def test_storage_emptied_and_filled_again_is_followed():
    with LiveBytes() as live:
        tensor = kib(4)
        tensor.untyped_storage().resize_(0)
        assert live.current_bytes == 0
        tensor.untyped_storage().resize_(2 * KIB)
        assert (live.current_bytes, live.peak_bytes) == (2 * KIB, 4 * KIB)


def test_resize_is_torchs_own_again_afterwards():
    original = torch.UntypedStorage.resize_
    with LiveBytes(), LiveBytes():
        assert torch.UntypedStorage.resize_ is not original
    assert torch.UntypedStorage.resize_ is original


def test_shared_memory_is_counted_once_until_both_are_gone():
    with LiveBytes() as live:
        source, target = kib(4), kib(4)
        target.untyped_storage().resize_(0)
        count_once(target.untyped_storage(), source.untyped_storage())
        target.untyped_storage().resize_(4 * KIB)
        assert live.current_bytes == 4 * KIB
        del source
        assert live.current_bytes == 4 * KIB
        del target
        assert live.current_bytes == 0


def test_heir_gone_first_leaves_nothing_behind():
    with LiveBytes() as live:
        source, target = kib(4), kib(4)
        target.untyped_storage().resize_(0)
        count_once(target.untyped_storage(), source.untyped_storage())
        target.untyped_storage().resize_(4 * KIB)
        del target
        other = kib(4)  # may get the address that target had
        assert live.current_bytes == 8 * KIB
        del source
        assert live.current_bytes == 4 * KIB
        del other
        assert live.current_bytes == 0


def test_spans_have_the_start_and_the_peak_of_their_own():
    with LiveBytes() as live:
        kept = kib(2)
        live.mark("big")
        kib(8)
        live.mark("small")
        kib(1)
    assert [(s.label, s.start_bytes, s.peak_bytes) for s in live.spans()] == [
        (None, 0, 2 * KIB),
        ("big", 2 * KIB, 10 * KIB),
        ("small", 2 * KIB, 3 * KIB),
    ]
    assert kept is not None


def test_reset_peak_starts_from_what_is_alive():
    with LiveBytes() as live:
        kept = kib(2)
        kib(8)
        live.reset_peak()
        assert live.peak_bytes == 2 * KIB
    assert kept is not None


def test_meta_tensors_count_like_real_ones():
    with LiveBytes() as live, torch.device("meta"):
        product = torch.ones(64, 64) @ torch.ones(64, 64)
        assert live.peak_bytes == 3 * 64 * 64 * 4
        assert live.current_bytes == product.untyped_storage().nbytes()


def test_what_autograd_saves_lives_until_backward():
    with LiveBytes() as live:
        leaf = torch.ones(256, requires_grad=True)
        loss = leaf.exp().exp().sum()  # exp saves its output
        assert live.current_bytes == 3 * KIB + 4
        loss.backward()
        assert live.current_bytes == 2 * KIB + 4  # the leaf, its gradient, the loss
