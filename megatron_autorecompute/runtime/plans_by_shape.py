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
STEPS = 32
"""A device that has less memory than when it was measured has less by parts of this."""
Key = tuple[CallShape, tuple[int, ...]]
"""A call's shape, and the budget of every stage."""


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
        self._budgets: tuple[int, ...] | None = None
        """Bytes of every stage when it was measured."""
        self._plans: dict[Key, Plan] = {}
        self._ran: dict[Key, int] = {}

    def next(self, plan: Plan) -> Plan:
        """Run the plan for the next call, solved from what the running one knows."""
        profile, missed = plan.profile, self._calls.missed_bytes
        if self._budgets is None:  # not the plan's, in which a call may have gone over them
            self._budgets = self._decisions.whole_budgets(plan.profile)
        uneven = self._decisions.with_routed(plan, self._calls.most_routed)
        if uneven is not None:  # what was missed is of this
            profile = uneven
            self._plans.clear()
            self._say(
                f"the experts of a rank got {self._calls.most_routed:,} tokens in a layer, more "
                "than ever before: counted from now on"
            )
        elif any(m > NOTICED * b for m, b in zip(missed, plan.budget_bytes, strict=False)):
            profile = self._decisions.with_missed(plan, missed)
            self._plans.clear()
            self._say(
                f"a call needed {gib(max(missed))} GiB more than predicted: counted from now on"
            )
        key = self._calls.shape, self._budgets_now(self._budgets)
        if key not in self._plans:
            self._plans[key] = self._decisions.solved(profile, key[1], plan.notes)
            self._say(_described(*key, self._budgets))
        self._switch(self._plans[key])
        self._ran[key] = self._ran.get(key, 0) + 1
        return self._plans[key]

    def _budgets_now(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What every stage has in the next call; less than measured in steps, to share plans."""
        short = self._calls.short_bytes or (0,) * len(whole)
        steps = (-(-less * STEPS // budget) for less, budget in zip(short, whole, strict=True))
        return tuple(
            max(1, budget - budget * step // STEPS)
            for budget, step in zip(whole, steps, strict=True)
        )

    def forget(self) -> None:
        """Keep no plan: each knows less than the one that runs now."""
        self._plans.clear()

    def saving(self) -> Saving | None:
        """What the plans saved so far; None before any ran."""
        if not self._plans:
            return None
        longest = max(self._plans, key=lambda key: key[0].tokens)
        policy = self._plans[longest].policy
        taken_ms = saved_ms = 0.0
        for key, times in self._ran.items():
            if key in self._plans:
                own = self._plans[key]
                one_ms = own.problem().cost(policy).step_ms * times
                taken_ms += one_ms
                saved_ms += one_ms - own.cost.step_ms * times
        top = longest[0].tokens
        shorter = sum(n for (shape, _), n in self._ran.items() if shape.tokens < top)
        calls = sum(self._ran.values())
        return Saving(calls, shorter, saved_ms / taken_ms if taken_ms else 0.0)

    def _say(self, what: str) -> None:
        self._decisions.job.say(f"recompute auto: {what}")


def _described(shape: CallShape, budgets: tuple[int, ...], whole: tuple[int, ...]) -> str:
    of = f", for {gib(min(budgets))} GiB, less than when it was measured" * (budgets != whole)
    return (
        f"a plan for up to {shape.tokens:,} tokens a microbatch and {shape.microbatches} "
        f"microbatches or more{of}"
    )
