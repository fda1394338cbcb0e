"""Megatron's own settings that offload, the same for all layers: `offload[…]` and, where layers
leave as a whole, `cpu_offloading/N` for every N.

There are few, and each that could be the fastest is replayed with its copies. `cpu_offloading/N`
are the only policies in which layers leave as a whole (Megatron takes them on one pipeline stage,
without recompute, for the first layers and not for all), so that the best of these is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.cpu_offloading import copy_ps
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.stage_times import residual_times, times_of
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.policy import (
    NONE,
    WHOLE,
    LayerPolicy,
    MegatronStrategy,
    RecomputePolicy,
)
from megatron_autorecompute.profile import ChoiceRecord, HostLink

if TYPE_CHECKING:
    from megatron_autorecompute.planner.search.solve import Planner

Found = tuple[RecomputePolicy, PolicyCost]


class OffloadSettings:
    """Of one planner's problem, for any number of budgets.

    Args:
        planner: of the problem.
        link: its profile's, to host memory.
    """

    def __init__(self, planner: Planner, link: HostLink) -> None:
        self.planner, self._link = planner, link
        self._table = CostTable(planner.profile, planner.percentile)

    @cached_property
    def of_modules(self) -> tuple[RecomputePolicy, ...]:
        """Those that offload modules and that the planner may use, each once."""
        kinds = self.planner.profile.kinds
        choices = [c for kind in kinds for c in (*map(_policy, kind.choices), *kind.equals)]
        sets = dict.fromkeys(c.offload for c in choices if c.offload and c != WHOLE)
        plain = [one for one in self.planner.manual_settings() if not one.recompute_num_layers]
        found = dict[RecomputePolicy, None]()
        for setting, offload in itertools.product(plain, sets):
            try:
                policy = self._runs(self.planner.manual_policy(replace(setting, offload=offload)))
                if self.planner.may_be(policy):
                    self._least_ms(policy)
                    found[policy] = None
            except (PolicyError, ProfileError):
                continue  # a layer has no record of it
        return tuple(found)

    def _runs(self, policy: RecomputePolicy) -> RecomputePolicy:
        """The policy in what its choices are on their layers, where some do nothing."""
        records = (self._table.record(*pair) for pair in enumerate(policy.layers))
        pairs = zip(policy.layers, records, strict=True)
        return RecomputePolicy(tuple(own if one is None else one.policy for own, one in pairs))

    @cached_property
    def of_whole_layers(self) -> tuple[RecomputePolicy, ...]:
        """`cpu_offloading/N`, of the fewest layers first; none on several stages, with an encoder
        or MTP depths, or where a layer has no record."""
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

    def fastest(self, policies: Sequence[RecomputePolicy], budgets: Sequence[int]) -> Found | None:
        """Of some policies the one with the shortest step that fits; None where none does."""
        best: Found | None = None
        for policy in policies:
            if best is not None and self._least_ms(policy) >= best[1].step_ms:
                continue
            if not self.planner.may_fit(policy, budgets):
                continue
            cost = self.planner.evaluate(policy)
            fits = all(
                own.peak_high_bytes <= budget and own.host_bytes <= self._link.host_bytes
                for own, budget in zip(cost.stages, budgets, strict=True)
            )
            if fits and (best is None or cost.step_ms < best[1].step_ms):
                best = policy, cost
        return best

    def _least_ms(self, policy: RecomputePolicy) -> float:
        """What its step does not take less than: what a stage computes, and all copies of whole
        layers, which share a stream."""
        layout, m = self.planner.layout, self.planner.schedule.num_microbatches
        units = [[self._table.chunk_units(c, policy) for c in chunks] for chunks in layout.stages]
        residual = residual_times(self._table, layout)
        busy_ps, copied_ps, link = times_of(units).plus(residual).busy.max(), 0, self._link
        for layer in range(policy.layers.count(WHOLE)):
            record = self._table.record(layer, WHOLE)
            for group in () if record is None else record.offload_groups:
                copied_ps += copy_ps(group, link.to_host_gb_per_s)
                copied_ps += copy_ps(group, link.to_device_gb_per_s)
        return m * max(int(busy_ps), copied_ps) / PS_PER_MS


def _policy(record: ChoiceRecord) -> LayerPolicy:
    return record.policy
