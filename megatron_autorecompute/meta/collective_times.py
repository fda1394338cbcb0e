"""How long a collective takes over the links that its ranks have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.meta.devices import Device, Efficiency

RING = "broadcast_"
"""A step of ring attention, which `context_parallel` writes so."""
ALLTOALL = "alltoall_base_"
_TOKENS = 1 << 14
"""The number of tokens with random scores; it gives 1%."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Over which experts a router that prefers none spreads the copies of a token."""

    experts: int
    copies: int
    """The copies of each token."""
    groups: int = 1
    """`moe_router_num_groups`: equal parts of the experts, in order."""
    chosen: int = 1
    """`moe_router_group_topk`: groups that the copies of one token are for."""


@functools.cache
def share_with_copies(spread: Spread, parts: int) -> float:
    """Share of a token's pairs with one of so many equal parts of the experts, in order, that have
    a copy for the part: of random scores by Megatron's rule (transformer/moe/moe_utils.py
    `group_limited_topk`)."""
    each = spread.experts // spread.groups
    scores = np.random.default_rng(0).random((_TOKENS, spread.groups, each))
    best = np.sort(scores)[:, :, -(spread.copies // spread.chosen) :].sum(axis=2)
    left = np.argsort(best)[:, : spread.groups - spread.chosen, None]
    np.put_along_axis(scores, left, -1.0, axis=1)
    found = np.argsort(scores.reshape(_TOKENS, -1))[:, -spread.copies :]
    has = np.zeros((_TOKENS, parts))
    np.put_along_axis(has, found * parts // spread.experts, 1.0, axis=1)
    return float(has.mean())


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a device, at the shares of their peaks that are assumed."""

    device: Device
    efficiency: Efficiency

    def seconds(
        self, name: str, whole_bytes: int, ranks: Sequence[int], spread: Spread | None = None
    ) -> float:
        """Seconds of one collective.

        A domain's GPUs have a network card each, which rings over several domains all use. An
        all-to-all sends its parts over link and network at the same time.

        Args:
            name: of the operation in torch's `c10d`.
            whole_bytes: everything that the group exchanges, as one of its ranks sees it.
            ranks: of the group, by their place in the job.
            spread: of an all-to-all of tokens by DeepEP or HybridEP: a domain gets one of all
                copies that are for its ranks and hands it on over its link, and the kernel has none
                of NCCL's time for each further rank.
        """
        size, reached = len(ranks), self.efficiency
        domain = self.device.link_domain
        local = sum(rank // domain == ranks[0] // domain for rank in ranks)
        link = self.device.link_bytes * reached.link
        network = self.device.network_bytes * reached.network
        per_rank_us = 0 if spread else reached.rank_us * (size - 1)
        start = (reached.collective_us + per_rank_us) * 1e-6
        if name.startswith("alltoall"):
            near, far = whole_bytes * (local - 1) / size, whole_bytes * (size - local) / size
            if spread and far:
                domains = size // local
                near = whole_bytes * (local - 1) / local
                far *= domains / spread.copies * share_with_copies(spread, domains)
            return start + max(near / link, far / network)
        if name == RING:
            return start + whole_bytes / (link if local == size else network)
        times = 2 if name.startswith("allreduce") else 1
        rate = link if local == size else min(link, network * local)
        return start + times * whole_bytes * (size - 1) / size / rate
