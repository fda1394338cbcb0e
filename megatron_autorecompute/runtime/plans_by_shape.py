"""Plans for calls of different lengths, each solved when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.runtime.calls import Calls, CallShape
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.units import gib

NOTICED = 0.001
"""Share of a stage's budget; if a call needs less than this more than predicted, no new plan is
made."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What plans for the lengths of calls saved, against one plan for the longest."""

    calls: int
    shorter: int
    """Calls that ran a plan for less than the longest."""
    share: float
    """Of the predicted time of all calls under one plan."""

    def __str__(self) -> str:
        return (
            f"recompute auto: {self.shorter} of {self.calls} calls ran a plan for shorter "
            f"microbatches, which saved {self.share:.1%} of the predicted time of one plan for all"
        )


class PlansByShape:
    """The plans of a loop whose calls differ; every rank makes one in the same way.

    Args:
        decisions: of the job.
        calls: what is known of the next call.
        switch: runs a plan.
    """

    def __init__(self, decisions: Decisions, calls: Calls, switch: Callable[[Plan], None]) -> None:
        self._decisions, self._calls, self._switch = decisions, calls, switch
        self._plans: dict[CallShape, Plan] = {}
        self._ran: dict[CallShape, int] = {}

    def next(self, plan: Plan) -> Plan:
        """Run the plan for the next call, solved from what the running one knows."""
        shape, profile = self._calls.shape, plan.profile
        missed = self._calls.missed_bytes
        if any(m > NOTICED * b for m, b in zip(missed, plan.budget_bytes, strict=False)):
            profile = self._decisions.with_missed(plan, missed)
            self._plans.clear()
            self._say(
                f"a call needed {gib(max(missed))} GiB more than predicted: counted from now on"
            )
        if shape not in self._plans:
            self._plans[shape] = self._decisions.solved(profile, plan.budget_bytes, plan.notes)
            self._say(
                f"a plan for up to {shape.tokens:,} tokens a microbatch and {shape.microbatches} "
                "microbatches or more"
            )
        self._switch(self._plans[shape])
        self._ran[shape] = self._ran.get(shape, 0) + 1
        return self._plans[shape]

    def forget(self, plan: Plan) -> None:
        """Keep no plan that knows less than this one."""
        self._plans.clear()

    def saving(self) -> Saving | None:
        """What the plans saved so far; None before any ran."""
        if not self._plans:
            return None
        longest = max(self._plans, key=lambda shape: shape.tokens)
        policy = self._plans[longest].policy
        taken_ms = saved_ms = 0.0
        for shape, times in self._ran.items():
            if shape in self._plans:
                own = self._plans[shape]
                one_ms = own.planner().evaluate(policy).step_ms * times
                taken_ms += one_ms
                saved_ms += one_ms - own.cost.step_ms * times
        shorter = sum(n for shape, n in self._ran.items() if shape.tokens < longest.tokens)
        calls = sum(self._ran.values())
        return Saving(calls, shorter, saved_ms / taken_ms if taken_ms else 0.0)

    def _say(self, what: str) -> None:
        self._decisions.job.say(f"recompute auto: {what}")
