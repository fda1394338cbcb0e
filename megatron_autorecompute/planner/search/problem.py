"""What is asked of the search, as a value: the shortest step of a model under budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from megatron_autorecompute.errors import OptionError, PolicyError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.peak_memory import (
    check_figures,
    check_layout,
    for_schedule,
)
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost, PolicyCosts
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.planner.search.stage import Stage, Tables
from megatron_autorecompute.planner.search.stage_problem import OnlyChoices, StageChoice
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile

Budget = int | Sequence[int]
Percentile = float | None | Literal["stated"]
NO_LIMIT = 1 << 60
"""A budget that every choice fits, in bytes; no plan's is larger."""


class Stages:
    """What does not depend on a problem's budgets: costs, and the searches of stages."""

    def __init__(self, costs: PolicyCosts, only: OnlyChoices) -> None:
        self.costs, tables = costs, Tables()
        numbers = range(costs.layout.num_stages)
        self.all = tuple(Stage(costs, number, only, tables) for number in numbers)
        """The searches of all stages."""

    def stage(self, number: int) -> Stage:
        """The search of one stage."""
        return self.all[number]

    @cached_property
    def leanest(self) -> tuple[StageChoice, ...]:
        """The choices of each stage with the lowest peak."""
        return tuple(stage.leanest for stage in self.all)

    @cached_property
    def fastest(self) -> tuple[StageChoice, ...]:
        """The fastest choices of each stage without a memory limit."""
        found = (stage.fastest(NO_LIMIT) for stage in self.all)
        return tuple(choice for choice in found if choice is not None)


@dataclass(frozen=True)
class Problem:
    """The question to `solve`: which policy is the fastest that fits a budget?

    Raises: ProfileError if profile, layout and schedule do not belong together; PolicyError if a
    text of `allowed` is not a choice, or for another number of budgets than stages; OptionError for
    a budget that is no whole number of bytes.
    """

    profile: Profile
    """What every choice costs on every kind of layer."""
    layout: Layout
    """The layers of each stage and chunk, for the profile's model."""
    schedule: Schedule
    """The order of forwards and backwards, for the layout's stages and chunks."""
    budget: Budget = NO_LIMIT
    """Bytes that torch may allocate on a device: one number for all stages, or one for each. The
    caller subtracts what lies outside torch from the device's memory."""
    percentile: Percentile = "stated"
    """The imbalance percentile to plan for. None takes the records as they are, which for measured
    records is the maximum. "stated" is `Profile.stated_percentile`."""
    allowed: Sequence[str] | None = None
    """Texts of the choices that may be used, such as "none" and "selective[core_attn]"; `full/N`
    stands for checkpoints around several layers. None allows every recorded choice. `ahead` lets
    full layers recompute ahead, alone beside every recorded choice."""

    def __post_init__(self) -> None:
        check_layout(self.profile, self.layout, self.schedule)
        check_figures(self.profile, self.schedule)
        # Frozen: this is the one place where a field is set.
        object.__setattr__(self, "profile", for_schedule(self.profile, self.schedule))
        for size in self.budgets:
            if type(size) is not int or size > NO_LIMIT:
                raise OptionError(
                    f"The budget {size!r:.80} is no whole number of bytes up to {NO_LIMIT}. Give "
                    "an int for all stages, such as 70 << 30, or one for each."
                )
        if len(self.budgets) != self.layout.num_stages:
            raise PolicyError(
                f"{len(self.budgets)} budgets for {self.layout.num_stages} stages. Give one for "
                "all or one for each."
            )
        _ = self.only

    def at(self, budget: Budget) -> Problem:
        """This problem with another budget; what does not depend on it is shared."""
        other = replace(self, budget=budget)
        vars(other)["stages"] = self.stages
        return other

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """Bytes for every stage."""
        found: Any = self.budget  # checked when the problem is made
        if isinstance(found, Sequence) and not isinstance(found, str | bytes):
            return tuple(found)
        return (found,) * self.layout.num_stages

    @cached_property
    def imbalance_percentile(self) -> float | None:
        """The percentile that layers with experts are planned for; None: records as they are."""
        stated = self.profile.stated_percentile
        return stated if self.percentile == "stated" else self.percentile

    @cached_property
    def only(self) -> OnlyChoices:
        """The choices that may be used."""
        return OnlyChoices.parse(self.allowed)

    @cached_property
    def stages(self) -> Stages:
        """Costs and the searches of stages, the same for all budgets."""
        percentile = self.imbalance_percentile
        costs = PolicyCosts(self.profile, self.layout, self.schedule, percentile)
        return Stages(costs, self.only)

    @property
    def costs(self) -> PolicyCosts:
        """Costs of any policy in the model."""
        return self.stages.costs

    @property
    def table(self) -> CostTable:
        """The table of choices' costs, filled as budgets are met."""
        return self.costs.high

    def cost(self, policy: RecomputePolicy) -> PolicyCost:
        """The cost of any policy in the model."""
        return self.costs.of(policy)

    def allows(self, layer: int, choice: LayerPolicy) -> bool:
        """Whether a layer may have a choice."""
        return self.only.allow(self.table, layer, choice)

    @property
    def may_begin_early(self) -> bool:
        """Whether layers may recompute ahead, and there are stages that wait."""
        return self.only.ahead and self.layout.num_stages > 1

    def may_be(self, policy: RecomputePolicy) -> bool:
        """Whether a policy is made of what is allowed."""
        return all(self.allows(layer, choice) for layer, choice in enumerate(policy.layers))
