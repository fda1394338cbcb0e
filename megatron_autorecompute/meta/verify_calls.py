"""Runs calls whose microbatches differ in length through Megatron's own schedule, under a plan.

Stages exchange shapes (`variable_seq_lengths`), and samples are packed (THD) where the model's
attention takes packed samples. The plan is for the longest microbatch, and so bounds every call of
shorter ones (docs/decisions/bytes.md). These runs test that bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.meta.meta_step import StageStep
from megatron_autorecompute.meta.verify import COMPARABLE, StageCheck, kept_bytes, run_stages_of
from megatron_autorecompute.planner.cost.lengths import Arrangement, varies
from megatron_autorecompute.planner.cost.peak_memory import stage_base
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.planner.search.buckets import EXAMPLES

RANDOM = 2
"""Calls that run in the order in which they were drawn."""
MOST_RUN = 16
"""Microbatches of a call that a stage runs: those, of all in a row, with its highest peak."""

Lengths = tuple[int, ...]
"""Tokens of each microbatch of a call, on one rank, in order."""


def calls_of(plan: Plan) -> tuple[Lengths, ...]:
    """Calls to try: of those that the profile keeps, the fullest with its longest microbatches
    first, and RANDOM others.

    If it keeps none, lengths are drawn evenly, from 1/8 of the plan's to all of it. A plan for one
    length, or with EP overlap, has no such calls.
    """
    if not varies(plan.profile) or plan.schedule.overlap_moe_expert_parallel_comm:
        return ()
    texts = plan.profile.model.facts.get(EXAMPLES)
    if texts is None:
        draw, cap = random.Random(0), cap_of(plan)
        number = range(plan.schedule.num_microbatches)
        found = [tuple(draw.randint(-(-cap // 8), cap) for _ in number) for _ in range(1 + RANDOM)]
    else:
        found = [tuple(map(int, text.split())) for text in texts]
    fullest = max(found, key=sum)
    others = [lengths for lengths in found if lengths is not fullest]
    return (tuple(sorted(fullest, reverse=True)), *others[:RANDOM])


def cap_of(plan: Plan) -> int:
    """The tokens of a microbatch on a rank that the plan is for."""
    sizes = plan.profile.parallelism
    return sizes.seq_length * sizes.micro_batch_size // sizes.context_parallel


def verify_calls(
    plan: Plan,
    calls: Sequence[Lengths],
    bounds: Sequence[StageCheck],
    done: Callable[[StageCheck], None] = lambda _: None,
) -> tuple[StageCheck, ...]:
    """Run every stage of a plan in calls of mixed lengths.

    Args:
        plan: the plan to check; its profile has lines.
        calls: lengths, each padded here to what Megatron can divide.
        bounds: the plan's own checks, every microbatch as long as the plan's.
        done: called with each stage's check, call after call.

    Raises: what `fullest_parts` and `verify.verify` raise.
    """
    found: list[StageCheck] = []
    stages, parts = len(bounds), fullest_parts(plan, calls)

    def check(run: StageStep) -> None:
        call, stage = divmod(len(found), stages)
        found.append(_checked(plan, call + 1, parts[len(found)], bounds[stage], run))
        done(found[-1])

    if calls:
        run_stages_of(plan, [len(part) for part in parts], check, parts)
    return tuple(found)


def fullest_parts(plan: Plan, calls: Sequence[Lengths]) -> list[Lengths]:
    """What every stage runs of each call: the microbatches with its highest peak; call after call.

    Raises: ProfileError if the profile holds for one length, OptionError with EP overlap.
    """
    if calls and plan.schedule.overlap_moe_expert_parallel_comm:
        raise OptionError(
            "Calls of mixed lengths were asked for under overlap_moe_expert_parallel_comm: what a "
            "forward takes beside the backward of a shorter microbatch is not predicted. Leave "
            "the lengths out."
        )
    return [
        _fullest_part(plan, _padded(plan, lengths), stage)
        for lengths in calls
        for stage in range(plan.layout.num_stages)
    ]


def _checked(
    plan: Plan, number: int, lengths: Lengths, bound: StageCheck, run: StageStep
) -> StageCheck:
    inside = max(lengths) <= cap_of(plan)
    return replace(
        bound,
        predicted_bytes=_predicted_bytes(plan, lengths, run.stage),
        megatron_bytes=run.peak_bytes,
        megatron_moment=str(run.peak_span.where),
        job_bytes=None,
        call=number,
        lengths=lengths,
        bound_bytes=bound.megatron_bytes if inside else None,
    )


def _padded(plan: Plan, lengths: Lengths) -> Lengths:
    """Lengths as a loop pads them; interleaved, the longest are halved until the number fits."""
    sizes, stages = plan.profile.parallelism, plan.layout.num_stages
    unit = sizes.tensor_parallel if sizes.sequence_parallel else 1
    unit *= 2 if sizes.context_parallel > 1 else 1
    own = list(lengths)
    while plan.layout.num_chunks > 1 and len(own) % stages:
        longest = max(range(len(own)), key=own.__getitem__)
        half = own[longest] // 2
        own[longest : longest + 1] = [own[longest] - half, max(1, half)]
    return tuple(-(-one // unit) * unit for one in own)


def _fullest_part(plan: Plan, lengths: Lengths, stage: int) -> Lengths:
    """The consecutive microbatches of a long call with the stage's highest predicted peak."""
    stages = plan.layout.num_stages
    most = -(-max(MOST_RUN, 2 * stages) // stages) * stages
    starts = [*range(0, max(1, len(lengths) - most), most // 2), max(0, len(lengths) - most)]
    parts = [lengths[start : start + most] for start in starts]
    return max(parts, key=lambda part: _predicted_bytes(plan, part, stage))


def _predicted_bytes(plan: Plan, lengths: Lengths, stage: int) -> int:
    """Activation peak of a stage, as `StageCheck.predicted_bytes` is of the plan."""
    profile = replace(
        plan.profile,
        stages=tuple(replace(record, **COMPARABLE) for record in plan.profile.stages),
    )
    call = Arrangement(
        profile,
        plan.layout,
        replace(plan.schedule, num_microbatches=len(lengths)),
        plan.policy,
        tuple(Microbatch.longest(one) for one in lengths),
    )
    static = stage_base(profile, plan.layout, stage).static.total_bytes
    return call.stage_peak(stage) - static + kept_bytes(plan)[stage]
