"""Single changes that would make an infeasible plan fit, each solved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from megatron_autorecompute.errors import InfeasibleError, PipelineError, PolicyError, ProfileError
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout_flags import layout_flags
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shapes import promising
from megatron_autorecompute.planner.search.solve import try_solve
from megatron_autorecompute.policy import FULL

_LAYOUTS = 12  # tried for an error message, which should take seconds
_UNSCALED = (
    *("static", "embedding_static", "head_static", "also_static_bytes"),
    *("optimizer_step_peak_bytes", "step_end_ms", "measured_step"),
    *("available_bytes", "fragmentation_bytes", "others_bytes", "host", "host_link", "lines"),
)
"""Fields of a profile that do not grow with the activations."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that would make an infeasible plan fit."""

    text: str
    step_ms: float
    """Predicted time of the step with it."""


def cheapest_changes(problem: Problem) -> tuple[Change, ...]:
    """Changes, each alone, with which a plan fits; the fastest step first.

    For a smaller micro-batch, bytes and times of activations are scaled with it, which is an
    estimate; a profile at that size is better. For another layout, static bytes are added up from
    the kinds.
    """
    found: list[Change] = []
    for proposal in (_smaller_micro_batch, _full_recompute, _other_layout):
        try:
            for text, changed in proposal(problem):
                if solution := try_solve(changed):
                    found.append(Change(text, solution.cost.step_ms))
                    break
        except (InfeasibleError, PipelineError, ProfileError, PolicyError):
            continue  # this change does not fit, or the profile does not say
    return tuple(sorted(found, key=lambda change: change.step_ms))


Proposals = Iterator[tuple[str, Problem]]
"""What changes, and the problem with it; the first that fits counts."""


def _smaller_micro_batch(problem: Problem) -> Proposals:
    size = problem.profile.parallelism.micro_batch_size
    for smaller in (d for d in range(size - 1, 0, -1) if size % d == 0):
        profile = replace(_scaled(problem.profile, smaller / size), measured_step=None)
        microbatches = problem.schedule.num_microbatches * size // smaller
        schedule = replace(problem.schedule, num_microbatches=microbatches)
        text = f"micro-batch size {smaller} instead of {size} (scaled, not measured)"
        yield text, replace(problem, profile=profile, schedule=schedule)


def _full_recompute(problem: Problem) -> Proposals:
    if FULL not in (problem.only.choices or {FULL}):
        allowed = *(problem.allowed or ()), str(FULL)
        yield "full recompute as a choice", replace(problem, allowed=allowed)


def _other_layout(problem: Problem) -> Proposals:
    """The most promising layouts; `search_shapes` solves more of them."""
    model = problem.profile.model
    if problem.layout.num_stages == 1 or model.encoder_layers:
        return
    for layout in promising(problem)[:_LAYOUTS]:
        flags = layout_flags(layout, pattern_of_job(model.facts))
        text = " ".join(f"{name} {value}" for name, value in flags.items())
        yield f"another layout: {text}", replace(problem, layout=layout)


def _scaled(found: Any, factor: float) -> Any:
    """A profile, or a record in it, with the bytes and milliseconds of activations times a
    factor."""
    if isinstance(found, tuple):
        return tuple(_scaled(own, factor) for own in found)
    if not is_dataclass(found) or isinstance(found, type):
        return found
    changed: dict[str, Any] = {}
    for name in (each.name for each in fields(found) if each.name not in _UNSCALED):
        own = getattr(found, name)
        if name == "residual_bytes":  # in part what the job itself keeps
            changed[name] = max(own, round(own * factor))
        elif name.endswith("_bytes") and own is not None:
            changed[name] = round(own * factor)
        else:
            changed[name] = own * factor if name.endswith("_ms") else _scaled(own, factor)
    return replace(found, **changed)


def explained(error: InfeasibleError, problem: Problem) -> InfeasibleError:
    """The error, with changes that would make the plan fit added to its message."""
    changes = cheapest_changes(problem)
    if not changes:
        return InfeasibleError(f"{error} More pipeline stages or tensor parallelism need less.")
    lines = [f"{error} Each of these alone would fit:"]
    lines += [f"  - {change.text}: {change.step_ms:.0f} ms a step" for change in changes]
    return InfeasibleError("\n".join(lines))
