"""Megatron's `cpu_offloading/N` for every N: the only policies in which layers leave as a whole.

Megatron takes them on one pipeline stage, without recompute, for the first layers and not for all.
So there are few, and every one that could be the best is replayed with its copies: the best is
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_autorecompute.planner.policy_cost import PolicyCost
from megatron_autorecompute.planner.stage_times import residual_times, times_of
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.planner.whole_layers import copy_ps
from megatron_autorecompute.policy import NONE, WHOLE, MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import HostLink

if TYPE_CHECKING:
    from megatron_autorecompute.planner.planner import Planner


class WholeLayerSearch:
    """Of one planner's problem, for any number of budgets.

    Args:
        planner: whose profile has a `host_link`.
        cost: what a policy costs with its copies, worked out once.
    """

    def __init__(
        self, planner: Planner, link: HostLink, cost: Callable[[RecomputePolicy], PolicyCost]
    ) -> None:
        self.planner, self._link, self._cost = planner, link, cost

    @cached_property
    def policies(self) -> tuple[RecomputePolicy, ...]:
        """Those that Megatron runs and the planner may use, of the fewest layers that leave first;
        none on several stages, with an encoder or MTP depths, or where a layer has no record."""
        profile, layout = self.planner.profile, self.planner.layout
        recorded = all(
            kind.record(choice) is not None and self.planner.allows(kind.layers[0], choice)
            for kind in profile.kinds
            if kind.layers
            for choice in (NONE, WHOLE)
        )
        blocks = profile.model.mtp_num_layers or profile.model.encoder_layers
        if not recorded or layout.num_stages > 1 or blocks:
            return ()
        return tuple(
            MegatronStrategy("cpu_offloading", (), number).policy(profile.num_layers)
            for number in range(1, profile.num_layers)
        )

    def fastest(self, budgets: Sequence[int]) -> tuple[RecomputePolicy, PolicyCost] | None:
        """The one with the shortest step that fits; None where none does."""
        best: tuple[RecomputePolicy, PolicyCost] | None = None
        for policy, least_ms in zip(self.policies, self._least_ms(), strict=True):
            if best is not None and least_ms >= best[1].step_ms:
                continue
            if not self.planner.may_fit(policy, budgets):
                continue
            cost = self._cost(policy)
            own = cost.stages[0]
            fits = own.peak_high_bytes <= budgets[0] and own.host_bytes <= self._link.host_bytes
            if fits and (best is None or cost.step_ms < best[1].step_ms):
                best = policy, cost
        return best

    def _least_ms(self) -> Iterator[float]:
        """What no step takes less than, for every policy: what is computed, and all copies, which
        share a stream."""
        planner, m = self.planner, self.planner.schedule.num_microbatches
        table, copied_ps, link = CostTable(planner.profile, planner.percentile), 0, self._link
        chunks = planner.layout.stages[0]
        for number, policy in enumerate(self.policies):
            units = [[table.chunk_units(chunk, policy) for chunk in chunks]]
            busy_ps = int(times_of(units).plus(residual_times(table, planner.layout)).busy[0])
            record = table.record(number, WHOLE)
            for group in () if record is None else record.offload_groups:
                copied_ps += copy_ps(group, link.to_host_gb_per_s)
                copied_ps += copy_ps(group, link.to_device_gb_per_s)
            yield m * max(busy_ps, copied_ps) / PS_PER_MS
