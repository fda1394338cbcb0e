"""torch's deterministic algorithms, which a job asks for by `deterministic_mode`.

Megatron asks torch, not its config, and keeps other tensors with them: experts' outputs are added
up by `index_add_`, which saves them, instead of `scatter_add_` (transformer/moe/moe_utils.py
`unpermute`, without `moe_permute_fusion`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_autorecompute.patched import unchanged_environ


@contextlib.contextmanager
def deterministic(mode: bool) -> Iterator[None]:
    """torch's algorithms of that mode in the block. Afterwards they are as they were, and so are
    the variables of the environment that Megatron's parser sets with them."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        with unchanged_environ():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
