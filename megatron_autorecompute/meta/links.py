"""How long a collective takes over the links that its ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_autorecompute.meta.devices import Device, Efficiency

RING = "broadcast_"
"""A step of ring attention, which `context_parallel` writes so."""
ALLTOALL = "alltoall_base_"


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a device, at the shares of their peaks that are assumed."""

    device: Device
    efficiency: Efficiency

    def seconds(self, name: str, whole_bytes: int, ranks: Sequence[int], copies: int = 0) -> float:
        """Seconds of one collective.

        A domain's GPUs have a network card each, which rings over several domains all use. An
        all-to-all sends its parts over link and network at the same time.

        Args:
            name: of the operation in torch's `c10d`.
            whole_bytes: everything that the group exchanges, as one of its ranks sees it.
            ranks: of the group, by their place in the job.
            copies: of an all-to-all of tokens, if a domain gets one of all that are for its
                ranks and hands it on over its link: how many of each token there are.
        """
        size, reached = len(ranks), self.efficiency
        domain = self.device.link_domain
        local = sum(rank // domain == ranks[0] // domain for rank in ranks)
        link = self.device.link_bytes * reached.link
        network = self.device.network_bytes * reached.network
        start = (reached.collective_us + reached.rank_us * (size - 1)) * 1e-6
        if name.startswith("alltoall"):
            near, far = whole_bytes * (local - 1) / size, whole_bytes * (size - local) / size
            if copies and far:
                domains = size / local
                near = whole_bytes * (local - 1) / local
                far *= domains / copies * (1 - (1 - 1 / domains) ** copies)
            return start + max(near / link, far / network)
        if name == RING:
            return start + whole_bytes / (link if local == size else network)
        times = 2 if name.startswith("allreduce") else 1
        rate = link if local == size else min(link, network * local)
        return start + times * whole_bytes * (size - 1) / size / rate
