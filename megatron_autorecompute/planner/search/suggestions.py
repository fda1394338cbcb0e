"""Single changes that would make an infeasible plan fit.

For each change the policy is solved exactly. The effect of the change on bytes and times is not
measured: they are scaled or added up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from megatron_autorecompute.errors import InfeasibleError, PipelineError, PolicyError, ProfileError
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    layers_per_stage,
    layout_flags,
    uneven_layout,
    uneven_sizes,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import try_solve
from megatron_autorecompute.policy import FULL
from megatron_autorecompute.profile import Profile, StaticBytes

_NEAREST_LAYOUTS = 12  # tried for an error message, which should take seconds
_UNSCALED = (
    *("static", "embedding_static", "head_static"),
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


def cheapest_changes(problem: Problem, most: int = 3) -> tuple[Change, ...]:
    """Up to three changes, each alone, with which a plan fits; the fastest step first.

    For a smaller micro-batch, bytes and times of activations are scaled with it, which is an
    estimate; a profile at that size is better. For twice the stages and for another layout, static
    bytes are added up from the kinds. Twice the stages are on the same GPUs, where the half of the
    data-parallel ranks is left to share a step's samples and the optimizer's state, or else on
    twice the GPUs.
    """
    found: list[Change] = []
    for proposal in (_smaller_micro_batch, _full_recompute, _other_layout, _more_stages):
        try:
            for text, changed in proposal(problem):
                if solution := try_solve(changed):
                    found.append(Change(text, solution.cost.step_ms))
                    break
        except (InfeasibleError, PipelineError, ProfileError, PolicyError):
            continue  # this change does not fit, or the profile does not say
    return tuple(sorted(found, key=lambda change: change.step_ms)[:most])


Proposals = Iterator[tuple[str, Problem]]
"""What changes, and the problem with it; the first that fits counts."""


def _smaller_micro_batch(problem: Problem) -> Proposals:
    size = problem.profile.parallelism.micro_batch_size
    for smaller in (d for d in range(size - 1, 0, -1) if size % d == 0):
        profile = replace(_scaled(problem.profile, smaller / size), measured_step=None)
        schedule = _repeated(problem.schedule, size // smaller)
        text = f"micro-batch size {smaller} instead of {size} (scaled, not measured)"
        yield text, replace(problem, profile=profile, schedule=schedule)


def _full_recompute(problem: Problem) -> Proposals:
    if FULL not in (problem.only.choices or {FULL}):
        allowed = *(problem.allowed or ()), str(FULL)
        yield "full recompute as a choice", replace(problem, allowed=allowed)


def _other_layout(problem: Problem) -> Proposals:
    """The nearest layouts; `search_layout` finds the fastest one, and takes longer."""
    model = problem.profile.model
    if problem.layout.num_stages == 1 or model.encoder_layers:
        return
    for layout in _nearest(problem.layout):
        flags = layout_flags(layout, pattern_of_job(model.facts))
        text = " ".join(f"{name} {value}" for name, value in flags.items())
        yield f"another layout: {text}", replace(problem, layout=layout)


def _nearest(asked: Layout) -> Iterator[Layout]:
    """The layouts by the flags for uneven stages that move the fewest layers, nearest first."""
    first, *between, last = layers_per_stage(asked)

    def moved(sizes: tuple[int, int, int]) -> int:
        at_first, middle, at_last = sizes
        ends = abs(at_first - first) + abs(at_last + asked.mtp_num_layers - last)
        return ends + sum(abs(middle - size) for size in between)

    for at_first, _, at_last in heapq.nsmallest(_NEAREST_LAYOUTS, uneven_sizes(asked), key=moved):
        layout = uneven_layout(asked, at_first, at_last)
        if layout not in (None, asked):
            yield layout


def _more_stages(problem: Problem) -> Proposals:
    model, stages = problem.profile.model, 2 * problem.layout.num_stages
    if model.encoder_layers:
        return
    wider = Layout.from_flags(
        model.num_layers, stages, problem.layout.num_chunks, mtp_num_layers=model.mtp_num_layers
    )
    times, where = _twice_the_ranks(problem)
    moved = replace(
        problem,
        profile=_with_state(problem.profile, times),
        layout=wider,
        schedule=replace(
            _repeated(problem.schedule, times), num_stages=stages, microbatch_group_size=None
        ),
        budget=max(problem.budgets),
    )
    yield f"{stages} pipeline stages instead of {stages // 2}{where}", moved


def _twice_the_ranks(problem: Problem) -> tuple[int, str]:
    """The factor on the microbatches of a data-parallel rank where twice as many ranks hold the
    model, and on which GPUs: the same ones if the model is there an even number of times."""
    shape, num_gpus = problem.profile.parallelism, problem.profile.num_gpus
    experts = shape.expert_parallel * shape.expert_tensor_parallel
    dense = shape.tensor_parallel * shape.context_parallel
    holders = math.lcm(dense, experts) * problem.layout.num_stages
    if num_gpus is not None and num_gpus % (2 * holders) == 0:
        return 2, " on the same GPUs"
    return 1, " on twice the GPUs"


def _repeated(schedule: Schedule, times: int) -> Schedule:
    return replace(schedule, num_microbatches=schedule.num_microbatches * times)


def _with_state(profile: Profile, times: int) -> Profile:
    """The profile with so many times the state of the optimizer."""

    def grown(old: StaticBytes | None) -> StaticBytes | None:
        return old and replace(old, optimizer_state_bytes=old.optimizer_state_bytes * times)

    return replace(
        profile,
        kinds=tuple(replace(kind, static=grown(kind.static)) for kind in profile.kinds),
        embedding_static=grown(profile.embedding_static),
        head_static=grown(profile.head_static),
    )


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
        return InfeasibleError(f"{error} No change this program knows would make it fit.")
    lines = [f"{error} Each of these alone would fit:"]
    lines += [f"  - {change.text}: {change.step_ms:.0f} ms a step" for change in changes]
    return InfeasibleError("\n".join(lines))
