"""Takes Megatron's best setting if the profile cannot tell that the fastest policy is faster."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_autorecompute.block_names import MEGATRON
from megatron_autorecompute.planner.cost.step_interval import COVERAGE, StepErrors
from megatron_autorecompute.planner.search.manual import ManualStrategy
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, instead
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.work_order import contains

_TAKEN = "is taken:"
_UNSURE = f"but not surely: it is shorter in fewer than {COVERAGE:.0%} of profiles."

_SHOWN = 5e-6
"""A smaller share is 0.000% in the sentence."""


def simpler_within_errors(
    problem: Problem, fastest: Solution, manual: ManualStrategy | None
) -> tuple[Solution, tuple[str, ...]]:
    """The fastest policy, or Megatron's best own setting if it is not surely slower.

    Args:
        problem: the problem of both.
        fastest: solved.
        manual: the fastest of Megatron's own settings that fits; None when none does.

    Returns: what is to be planned, and a sentence if that is not the fastest policy found.
    """
    if manual is None:
        return fastest, ()
    simple = problem.table.without_dead_work(manual.policy)  # holds the same, and reruns no more
    if not problem.may_be(simple) or _reruns_no_more(fastest.policy, simple):
        return fastest, ()
    own = StepErrors(problem.costs, fastest.policy)
    if own.surely_shorter(StepErrors(problem.costs, simple)):
        return fastest, ()
    simpler = instead(problem, simple, fastest)
    less = 1 - fastest.cost.step_ms / simpler.cost.step_ms
    if less < _SHOWN:
        return simpler, ()
    return simpler, (gave_way(manual.name, fastest.policy.format(), less),)


def gave_way(taken: str, faster: str, less: float) -> str:
    """The sentence that says why something is planned that is not the fastest found.

    Args:
        taken: what is planned.
        faster: what gave way.
        less: by how much it is faster, as a share.
    """
    if less < _SHOWN:
        return f"{taken} {_TAKEN} {faster} takes as long by the profile's times."
    return f"{taken} {_TAKEN} {faster} takes {less:.3%} less by the profile's times, {_UNSURE}"


def without_gave_way(notes: Sequence[str]) -> list[str]:
    """Notes of a plan, without such sentences of its own solution, for another plan in its place.

    Sentences of a search of layouts or micro-batch sizes, which came before it, stay.
    """
    return [
        note
        for note in notes
        if not (note.startswith(MEGATRON) and _TAKEN in note and note.endswith(_UNSURE))
    ]


def _reruns_no_more(policy: RecomputePolicy, other: RecomputePolicy) -> bool:
    """Whether each layer reruns at most what it reruns in the other, which no noise can change."""
    pairs = zip(policy.layers, other.layers, strict=True)
    return all(own == theirs or contains(theirs, own) for own, theirs in pairs)
