"""A plan as text for a terminal of 80 columns."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_autorecompute.planner.layer_sums import sums_of_layers
from megatron_autorecompute.planner.layout import Chunk
from megatron_autorecompute.planner.plan import CurvePoint, Plan
from megatron_autorecompute.planner.policy_cost import PolicyCost
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import LayerKind, MeasuredStep, Profile, RankStep
from megatron_autorecompute.units import GIB, gib

MOST_RANKS = 16
"""Most rows of the measured step; with more ranks, every stage has one row."""


def legend(policy: RecomputePolicy) -> dict[LayerPolicy, str]:
    """One character per choice: `.` none, `F` full, letters for selective sets in order."""
    letters = iter(string.ascii_lowercase)
    symbols: dict[LayerPolicy, str] = {}
    for choice in policy.layers:
        if choice not in symbols:
            symbols[choice] = {"none": ".", "full": "F"}.get(choice.granularity) or next(letters)
    return symbols


def strip(policy: RecomputePolicy, chunks: Sequence[Chunk]) -> str:
    """One character per layer, `|` between chunks, `(FFF)` around each checkpoint of several."""
    symbols = legend(policy)
    return "|".join(_chunk_strip(policy, chunk, symbols) for chunk in chunks)


def _chunk_strip(policy: RecomputePolicy, chunk: Chunk, symbols: dict[LayerPolicy, str]) -> str:
    parts = ["E" * chunk.embedding]
    for run in policy.chunk_runs(chunk.layers):
        group = run.policy.group
        whole = symbols[run.policy] * run.count
        parts.append(
            whole if group == 1 else f"({symbols[run.policy] * group})" * (run.count // group)
        )
    return "".join([*parts, "L" * chunk.head])


def plan_view(plan: Plan) -> RenderableType:
    """Header, one row per stage, legend, evidence and assumptions, the measured step."""
    views = _header(plan), _stages(plan), _legend(plan.policy), _footer(plan)
    return Group(*views, *measured_step_view(plan))


def measured_step_view(plan: Plan) -> Iterator[RenderableType]:
    """A measuring step, one row per rank: the sum of its layers beside Megatron's figures.

    With more than MOST_RANKS ranks, only the rank of each stage that computed longest. Empty if no
    such step was recorded.
    """
    step = plan.profile.measured_step
    if step is None:
        return
    sums = sums_of_layers(plan)
    if sums is None:
        yield Text(
            f"Iteration {step.iteration} was measured with other layers on a stage: not shown "
            "beside this plan."
        )
        return
    yield Text(
        f"\nMeasured in iteration {step.iteration} under {step.recompute_policy}: the sum of its "
        f"layers beside Megatron's timers (all {step.num_microbatches} microbatches, ms) and "
        "torch's memory statistics (GiB):"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (
        "rank/\nstage",
        "forward:\nlayers",
        "forward-\ncompute",
        "backward:\nlayers",
        "backward-\ncompute",
        "\noptimizer",
        "peak:\nlayers",
        "max\nallocated",
        "max\nreserved",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    ranks = shown_ranks(step)
    for rank in ranks:
        own = sums[rank.stage]
        table.add_row(
            f"{rank.rank}/{rank.stage}",
            _ms(own.forward_ms),
            _ms(rank.forward_compute_ms),
            _ms(own.backward_ms),
            _ms(rank.backward_compute_ms),
            _ms(rank.optimizer_ms),
            _gib_or_not(own.peak_bytes),
            _gib_or_not(rank.max_memory_allocated_bytes),
            _gib_or_not(rank.max_memory_reserved_bytes),
        )
    yield table
    if len(ranks) < len(step.ranks):
        yield Text(
            f"Of {len(step.ranks)} ranks the one of each stage that computed longest; all are in "
            "the plan file."
        )


def shown_ranks(step: MeasuredStep) -> list[RankStep]:
    """All ranks of a small job, else the rank of each stage that computed longest."""
    if len(step.ranks) <= MOST_RANKS:
        return list(step.ranks)
    longest: dict[int, RankStep] = {}
    for rank in step.ranks:
        known = longest.get(rank.stage)
        if known is None or _compute_ms(rank) > _compute_ms(known):
            longest[rank.stage] = rank
    return [longest[stage] for stage in sorted(longest)]


def _compute_ms(rank: RankStep) -> float:
    return (rank.forward_compute_ms or 0.0) + (rank.backward_compute_ms or 0.0)


def _ms(value: float | None) -> str:
    if value is None:
        return "not\nrunning"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _gib_or_not(size_bytes: int | None) -> str:
    return "not\nkept" if size_bytes is None else f"{size_bytes / GIB:.3g}"


def _header(plan: Plan) -> Text:
    shape, model = plan.profile.parallelism, plan.profile.model
    schedule = plan.schedule
    lines = [
        f"{model.name}: {plan.profile.num_layers} layers, micro-batch {shape.micro_batch_size}, "
        f"sequence {shape.seq_length}, tp {shape.tensor_parallel}",
        f"{schedule.num_stages} stages of {schedule.num_chunks} chunks, "
        f"{schedule.num_microbatches} microbatches: {plan.cost.step_ms:.1f} ms a step, "
        f"{plan.cost.recompute_ms:.1f} ms of it recompute",
    ]
    if plan.cost.step_low_ms is not None and plan.cost.step_high_ms is not None:
        lines.append(
            f"By the spread of the measured times, {plan.cost.step_low_ms:.1f} to "
            f"{plan.cost.step_high_ms:.1f} ms a step"
        )
    if plan.best_manual is not None:
        gain = 100 * (1 - plan.cost.step_ms / plan.best_manual.step_ms)
        lines.append(
            f"Megatron's best own setting that fits: {plan.best_manual.name}, "
            f"{plan.best_manual.step_ms:.1f} ms; this plan takes {gain:.1f}% less"
        )
    else:
        lines.append("None of Megatron's own settings fits the budget")
    return Text("\n".join(lines))


def _stages(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("stage", justify="right")
    table.add_column("policy", overflow="fold", ratio=1)
    for name in ("peak GiB", "budget", "recompute ms"):
        table.add_column(name, justify="right", no_wrap=True)
    policy = plan.policy
    for stage, chunks in enumerate(plan.layout.stages):
        cost = plan.cost.stages[stage]
        table.add_row(
            str(stage),
            Text(strip(policy, chunks)),
            gib(cost.peak_high_bytes),
            gib(plan.budget_bytes[stage]),
            f"{cost.recompute_ms:.1f}",
        )
    return table


def _legend(policy: RecomputePolicy) -> Text:
    symbols = {symbol: choice for choice, symbol in legend(policy).items() if choice.group == 1}
    lines = [f"{symbol} {choice}" for symbol, choice in sorted(symbols.items())]
    if any(choice.group > 1 for choice in policy.layers):
        lines.append("(FF) full, one checkpoint around these layers")
    lines.append("E embedding, L head and loss, | next chunk")
    return Text("\n".join(lines))


def _footer(plan: Plan) -> Text:
    lines = [_proof([evidence.gap for evidence in plan.evidence])]
    lines += imbalance_lines(plan.profile, plan.imbalance_percentile)
    lines += [f"Set {name} {value}" for name, value in plan.megatron_flags.items()]
    lines += [*plan.notes, *(f"Assumes: {text}" for text in plan.profile.assumptions)]
    return Text("\n".join(lines))


def _proof(gaps: Sequence[float | None]) -> str:
    known = [gap for gap in gaps if gap is not None]
    if len(known) < len(gaps):
        return (
            "Not proven: the file was changed after it was written, or another version of this "
            "program wrote it. plan --profile with this file solves it again."
        )
    most = max(known)
    proof = "proven optimal" if most == 0 else f"within {100 * most:.3f}% of the optimum"
    return f"Each stage's choices are {proof} in this model."


def imbalance_lines(profile: Profile, percentile: float | None) -> list[str]:
    """Sentences on the routing imbalance that is planned for; none without experts."""
    records = [record for kind in profile.kinds for record in kind.choices]
    measured = [point for r in records if r.knows_routing for point in r.percentiles]
    stated = any(kind.imbalance for kind in profile.kinds)
    lines = []
    if measured and percentile is None:
        lines.append(
            "Imbalance: planned for the most that was seen in measuring; --imbalance-percentile "
            "plans for less."
        )
    elif measured and percentile is not None:
        most = max(point.percentile for point in measured)
        seen = "" if percentile <= most else ", above all recorded: the most that was seen"
        lines.append(
            f"Imbalance: planned for percentile {percentile:g} of the measured microbatches{seen}."
        )
    if stated and percentile is None:
        lines.append("Imbalance: what the profile states is not planned for.")
    elif stated and percentile is not None:
        lines.append(
            f"Imbalance: planned for percentile {percentile:g} of what the profile states, "
            f"{', '.join(_factors(profile.kinds, percentile))}."
        )
    return lines


def _factors(kinds: Sequence[LayerKind], percentile: float) -> Iterator[str]:
    """`moe x 1.25`, with the stated percentile if it differs from the planned one."""
    for kind in kinds:
        if point := kind.imbalance_at(percentile):
            of = "" if point.percentile == percentile else f" (stated for {point.percentile:g})"
            yield f"{kind.name} x {point.factor:g}{of}"


def stages_explained(plan: Plan) -> RenderableType:
    """Per stage: the binding moment, and the parts of the peak."""
    parts: list[RenderableType] = []
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    names = (
        "stage",
        "static",
        "in\nflight",
        "running",
        "tran-\nsient",
        "emb+\nhead",
        "over-\nhead",
    )
    for name in (*names, "peak\nGiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for cost in plan.cost.stages:
        split = cost.peak.breakdown
        values = (
            split.static_bytes,
            split.in_flight_bytes,
            split.running_bytes,
            split.transient_bytes,
            split.embedding_head_bytes,
            split.overhead_bytes,
            split.total_bytes,
        )
        table.add_row(str(cost.stage), *map(gib, values))
    parts.append(table)
    for evidence, cost in zip(plan.evidence, plan.cost.stages, strict=True):
        parts.append(
            Text(
                f"stage {evidence.stage}: peak {gib(cost.peak_low_bytes)} to "
                f"{gib(cost.peak_high_bytes)} GiB of {gib(evidence.budget_bytes)}; "
                f"bound by {evidence.binding}"
            )
        )
    return Group(*parts, *measured_step_view(plan))


def neighbours_view(
    plan: Plan, layer: int, stage: int, found: Iterable[tuple[LayerPolicy, PolicyCost]]
) -> RenderableType:
    """One row per other choice of a layer."""
    chosen = plan.policy.layers[layer]
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("instead", overflow="fold")
    for name in ("step ms", "stage ms", "peak GiB", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in neighbour_rows(plan, stage, found):
        table.add_row(
            Text(str(row["choice"])),
            f"{row['step_ms']:+.3f}",
            f"{row['stage_busy_ms']:+.3f}",
            f"{float(row['peak_bytes']) / GIB:+.3f}",
            "yes" if row["fits"] else "no",
        )
    evidence = plan.evidence[stage]
    title = f"layer {layer}, stage {stage}: {chosen}. What the other choices would change:"
    return Group(Text(title), table, Text(f"The stage is bound by {evidence.binding}."))


def neighbour_rows(
    plan: Plan, stage: int, found: Iterable[tuple[LayerPolicy, PolicyCost]]
) -> list[dict[str, str | float | bool]]:
    """What each choice changes: step_ms, stage_busy_ms, peak_bytes (high end); whether it fits."""
    now = plan.cost.stages[stage]
    return [
        {
            "choice": str(choice),
            "step_ms": cost.step_ms - plan.cost.step_ms,
            "stage_busy_ms": cost.stages[stage].busy_ms - now.busy_ms,
            "peak_bytes": cost.stages[stage].peak_high_bytes - now.peak_high_bytes,
            "fits": cost.stages[stage].peak_high_bytes <= plan.budget_bytes[stage],
        }
        for choice, cost in found
    ]


def curve_view(points: Sequence[CurvePoint]) -> RenderableType:
    """One row per budget; policies wrap between their runs."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    for name in ("budget GiB", "step ms", "peak GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold", ratio=1)
    for point in points:
        table.add_row(
            gib(point.budget_bytes),
            f"{point.step_ms:.1f}",
            gib(point.peak_high_bytes),
            Text(point.recompute_policy.replace(",", ", ")),  # to wrap between runs
        )
    return table
