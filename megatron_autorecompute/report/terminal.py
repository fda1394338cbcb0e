"""A plan as text for a terminal of 80 columns."""

from __future__ import annotations

import shlex
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.peak_memory import stage_base
from megatron_autorecompute.planner.cost.policy_cost import StageCost, evaluate
from megatron_autorecompute.planner.cost.step_interval import COVERS
from megatron_autorecompute.planner.plan import WITH_OFFLOAD, ManualResult, Plan
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.policy import FULL, NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import MeasuredStep, Profile, RankStep
from megatron_autorecompute.report.words import binds, proof
from megatron_autorecompute.units import GIB, Unit, unit_for

CURVE_ROWS, MEGATRON_ROWS = 8, 4
"""Most rows of the curve: plans, and Megatron's own settings."""
SHORT_CHOICES = 3
"""Most choices that a shortened policy names."""
Item = TypeVar("Item")
PEAK_PARTS = (
    ("static", "static_bytes"),
    ("in\nflight", "in_flight_bytes"),
    ("running", "running_bytes"),
    ("tran-\nsient", "transient_bytes"),
    ("emb+\nhead", "embedding_head_bytes"),
    ("over-\nhead", "overhead_bytes"),
    ("CUDA\ngraphs", "graph_bytes"),
)
"""Columns of a peak: header, and the part of `Breakdown`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    header: str
    """The header's text, which may have several lines."""
    text: Callable[[Any], str]
    """The text of a row's item."""
    left: bool = False
    """Texts begin at the left; numbers end at the right."""


def rows(columns: Sequence[Column], items: Sequence[Any], gap: int = 2) -> Table:
    """A table with a row for each item, and so many blanks between two columns, without the columns
    in which no row has a text."""
    table = Table(box=None, pad_edge=False, padding=(0, gap - gap // 2, 0, gap // 2))
    shown = [own for own in columns if any(map(own.text, items))]
    for own in shown:
        table.add_column(own.header, justify="left" if own.left else "right", overflow="fold")
    for item in items:
        table.add_row(*(Text(own.text(item)) for own in shown))  # brackets are no markup
    return table


def best_own_setting(plan: Plan) -> str:
    """What `Plan.best_manual` is: settings that offload are not among those compared."""
    offloads = any(choice.offload for choice in plan.policy.layers)
    return f"Megatron's best own setting{' without offload' * offloads}"


def legend(policy: RecomputePolicy) -> dict[LayerPolicy, str]:
    """One character per choice: `.` none, `F` full, `K`, `M` and so on full with kept parts,
    lower-case letters in order for all others."""
    letters, keeps = iter(string.ascii_lowercase), iter("KMNOPQRSTU")
    symbols: dict[LayerPolicy, str] = {NONE: ".", FULL: "F"}
    for choice in policy.layers:
        whole = choice.granularity == "full"
        alone = replace(choice, group=1, inner=0, rerun_all=False) if whole else choice
        if alone not in symbols:
            symbols[alone] = next(keeps if whole else letters)
        symbols[choice] = symbols[alone]
    return {choice: symbols[choice] for choice in policy.layers}


def strip(policy: RecomputePolicy, chunks: Sequence[Chunk]) -> str:
    """One character per layer, `|` between chunks, `(FFF)` around each checkpoint of several."""
    symbols = legend(policy)
    return "|".join(_chunk_strip(policy, chunk, symbols) for chunk in chunks)


def _chunk_strip(policy: RecomputePolicy, chunk: Chunk, symbols: dict[LayerPolicy, str]) -> str:
    parts = ["E" * chunk.embedding]
    for run in policy.chunk_runs(chunk.layers):
        group = run.policy.group
        one = symbols[run.policy] * group
        parts.append((one if group == 1 else f"({one})") * (run.count // group))
    return "".join([*parts, "L" * chunk.head])


def plan_view(plan: Plan, speed: str = "", *, verbose: bool = False) -> RenderableType:
    """Header with `speed`, a sentence on bubble and throughput; one row per stage, legend,
    evidence, assumptions (every one if `verbose`, or only their number), the measured step."""
    views = _header(plan, speed), stages_view(plan), _footer(plan, verbose)
    return Group(*views, *measured_step_view(plan))


def measured_step_view(plan: Plan) -> Iterator[RenderableType]:
    """A measuring step, a row for the slowest rank of each stage: the sum of its layers beside
    Megatron's figures. Empty if no such step was recorded."""
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
    ranks = _slowest_ranks(step)
    unit, times = unit_for(own.peak.bytes for own in sums), step.num_microbatches
    yield Text(
        f"\nMeasured in iteration {step.iteration} under {step.recompute_policy}: the sum of its "
        f"layers beside Megatron's timers (all {times} microbatches, ms) and "
        f"torch's memory statistics ({unit.name}):"
    )
    columns = (
        Column("rank/\nstage", lambda rank: f"{rank.rank}/{rank.stage}"),
        Column("forward:\nlayers", lambda rank: _ms(sum(sums[rank.stage].forward_ms) * times)),
        Column("forward-\ncompute", lambda rank: _ms(rank.forward_compute_ms)),
        Column("backward:\nlayers", lambda rank: _ms(sum(sums[rank.stage].backward_ms) * times)),
        Column("backward-\ncompute", lambda rank: _ms(rank.backward_compute_ms)),
        Column("\noptimizer", lambda rank: _ms(rank.optimizer_ms)),
        Column("peak:\nlayers", lambda rank: _or_not(sums[rank.stage].peak.bytes, unit)),
        Column("max\nallocated", lambda rank: _or_not(rank.max_memory_allocated_bytes, unit)),
        Column("max\nreserved", lambda rank: _or_not(rank.max_memory_reserved_bytes, unit)),
    )
    yield rows(columns, ranks, gap=1)
    if len(ranks) < len(step.ranks):
        yield Text(
            f"Of {len(step.ranks)} ranks, each stage's slowest is shown. The plan file has all."
        )


def _slowest_ranks(step: MeasuredStep) -> list[RankStep]:
    """The rank of each stage that computed longest."""

    def computed_ms(rank: RankStep) -> float:
        return (rank.forward_compute_ms or 0.0) + (rank.backward_compute_ms or 0.0)

    longest = {rank.stage: rank for rank in sorted(step.ranks, key=computed_ms)}
    return [longest[stage] for stage in sorted(longest)]


def _ms(value: float | None) -> str:
    if value is None:
        return "not\nrunning"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _or_not(size_bytes: int | None, unit: Unit) -> str:
    if size_bytes is None:
        return "not\nkept"
    return f"{size_bytes / GIB:.3g}" if unit.size == GIB else unit.text(size_bytes)


def _header(plan: Plan, speed: str) -> Text:
    shape, model = plan.profile.parallelism, plan.profile.model
    schedule = plan.schedule
    lines = [
        f"{model.name}: {plan.profile.num_layers} layers, micro-batch {shape.micro_batch_size}, "
        f"sequence {shape.seq_length}, tp {shape.tensor_parallel}",
        f"{schedule.num_stages} stages of {schedule.num_chunks} chunks, "
        f"{schedule.num_microbatches} microbatches: {plan.cost.step_ms:.1f} ms a step, "
        f"{plan.cost.recompute_ms:.1f} ms of it recompute",
    ]
    lines += _begun_early(plan)
    if plan.step_interval is not None:
        lines.append(
            f"Interval: {plan.step_interval.low_ms:.1f} to {plan.step_interval.high_ms:.1f} ms a "
            f"step. {COVERS}"
        )
    if clock := binds(plan):
        lines.append(clock)
    if speed:
        lines.append(speed)
    if plan.best_manual is not None:
        gain = 100 * (1 - plan.cost.step_ms / plan.best_manual.step_ms)
        lines.append(
            f"{best_own_setting(plan)} that fits: {plan.best_manual.name}, "
            f"{plan.best_manual.step_ms:.1f} ms; this plan takes {gain:.1f}% less"
        )
    else:
        lines.append("None of Megatron's own settings fits the budget")
    return Text("\n".join(lines))


def stages_view(plan: Plan, measured_bytes: Sequence[int] | None = None) -> RenderableType:
    """One row per stage, with its measured peak if there is one, and what the letters mean."""
    unit = unit_for(stage.peak_high_bytes for stage in plan.cost.stages)
    columns = (
        Column("stage", lambda cost: str(cost.stage)),
        Column("policy", lambda cost: strip(policy, plan.layout.stages[cost.stage]), left=True),
        Column(f"peak {unit.name}", lambda cost: unit.text(cost.peak_high_bytes)),
        Column(
            "measured",
            lambda cost: "" if measured_bytes is None else unit.text(measured_bytes[cost.stage]),
        ),
        Column("budget", lambda cost: unit.text(plan.budget_bytes[cost.stage])),
        Column("recompute ms", lambda cost: f"{cost.recompute_ms:.1f}"),
    )
    policy = plan.policy
    return Group(rows(columns, plan.cost.stages), _legend(policy))


def _legend(policy: RecomputePolicy) -> Text:
    symbols = {symbol: choice for choice, symbol in legend(policy).items() if choice.group == 1}
    lines = [f"{symbol} {choice}" for symbol, choice in sorted(symbols.items())]
    if any(choice.group > 1 for choice in policy.layers):
        lines.append("(FF) full, one checkpoint around these layers")
    lines.append("E embedding, L head and loss, | next chunk")
    return Text("\n".join(lines))


def _footer(plan: Plan, verbose: bool) -> Text:
    lines = [proof(plan)]
    lines += imbalance_lines(plan.profile, plan.imbalance_percentile)
    lines += [f"Set {shlex.join((name, value))}" for name, value in plan.megatron_flags.items()]
    lines += [*plan.notes, *assumption_lines(plan.profile.assumptions, verbose)]
    return Text("\n".join(lines))


def assumption_lines(assumptions: Sequence[str], verbose: bool) -> list[str]:
    """Every assumption, or how many there are and how they are listed."""
    if verbose or not assumptions:
        return [f"Assumes: {text}" for text in assumptions]
    number = f"{len(assumptions)} assumptions" if len(assumptions) > 1 else "1 assumption"
    return [f"Rests on {number}; -v lists them."]


def imbalance_lines(profile: Profile, percentile: float | None) -> list[str]:
    """Sentences on the routing imbalance that is planned for; none without experts."""
    measured = any(r.knows_routing for kind in profile.kinds for r in kind.choices)
    stated = any(kind.imbalance for kind in profile.kinds)
    if percentile is None:
        most = "the most that was seen in measuring; --imbalance-percentile plans for less"
        said = [(measured, f"planned for {most}")]
        said += [(stated, "what the profile states is not planned for")]
    else:
        of = f"planned for percentile {percentile:g} of"
        said = [(measured, f"{of} the measured microbatches")]
        said += [(stated, f"{of} what the profile states")]
    return [f"Imbalance: {words}." for holds, words in said if holds]


def _begun_early(plan: Plan) -> Iterator[str]:
    """The layers whose recompute begins early, and what that saves; nothing if there are none."""
    if plan.policy.is_ahead:
        counts = (
            sum(plan.policy.layers[layer].ahead for chunk in chunks for layer in chunk.layers)
            for chunks in plan.layout.stages
        )
        layers = ", ".join(f"{n} of stage {stage}" for stage, n in enumerate(counts) if n)
        yield (
            "Recompute that begins early, while stages wait for gradients, saves "
            f"{plan.cost.ahead_ms:.1f} ms of a step. Layers: {layers}"
        )


def stages_explained(plan: Plan) -> RenderableType:
    """The binding moment of each stage, and the parts of its peak."""
    unit = unit_for(cost.peak_high_bytes for cost in plan.cost.stages)

    def of_peak(header: str, part: str) -> Column:
        def text(cost: StageCost) -> str:
            size_bytes = getattr(cost.peak.breakdown, part)
            return unit.text(size_bytes) if size_bytes else ""

        return Column(header, text)

    columns = (
        Column("stage", lambda cost: str(cost.stage)),
        *(of_peak(*each) for each in PEAK_PARTS),
        of_peak(f"peak\n{unit.name}", "total_bytes"),
    )
    parts: list[RenderableType] = [rows(columns, plan.cost.stages)]
    for evidence, cost in zip(plan.evidence, plan.cost.stages, strict=True):
        parts.append(
            Text(
                f"stage {evidence.stage}: peak {_range(cost, unit)} {unit.name} of "
                f"{unit.text(evidence.budget_bytes)}; "
                f"bound by {evidence.binding}"
            )
        )
    parts += [Text(line) for line in _begun_early(plan)]
    parts += map(Text, filter(None, [binds(plan)]))
    parts += [Text(note) for note in plan.notes if note.startswith(WITH_OFFLOAD)]
    return Group(*parts, *measured_step_view(plan))


def _range(cost: StageCost, unit: Unit) -> str:
    low, high = unit.text(cost.peak_low_bytes), unit.text(cost.peak_high_bytes)
    return low if low == high else f"{low} to {high}"


def curve_view(points: Sequence[CurvePoint], strategies: Sequence[ManualResult]) -> RenderableType:
    """Some ten rows, most bytes first: plans for even budgets, and Megatron's settings among them.

    Args:
        points: plans, at least one.
        strategies: Megatron's settings; the unbeaten ones are shown.
    """
    unit = unit_for(point.peak_high_bytes for point in points)
    ours = evenly(points, CURVE_ROWS)
    theirs = evenly(unbeaten(strategies), MEGATRON_ROWS)
    shown = [
        (p.peak_high_bytes, unit.text(p.budget_bytes), p.step_ms, shortened(p.recompute_policy))
        for p in ours
    ] + [(each.peak_high_bytes, "-", each.step_ms, each.name) for each in theirs]
    columns = (
        Column(f"budget {unit.name}", lambda row: row[1]),
        Column("step ms", lambda row: f"{row[2]:.1f}"),
        Column(f"peak {unit.name}", lambda row: unit.text(row[0])),
        Column("layers by choice", lambda row: row[3], left=True),
    )
    left_out = (
        f"{len(ours)} of {len(points)} budgets, {len(theirs)} of {len(strategies)} settings of "
        "Megatron's own; --json prints all, with whole policies. plan may find a shorter "
        "step at a budget."
    )
    return Group(rows(columns, sorted(shown, key=lambda row: -row[0])), Text(left_out))


def unbeaten(strategies: Iterable[ManualResult]) -> list[ManualResult]:
    """The strategies for which no other is faster with at most as many bytes."""
    found: list[ManualResult] = []
    for strategy in sorted(strategies, key=lambda s: (s.peak_high_bytes, s.step_ms)):
        if not found or strategy.step_ms < found[-1].step_ms:
            found.append(strategy)
    return found


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Evenly chosen items, at most so many, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def shortened(policy: str) -> str:
    """How many layers have each choice: `44 full, 30 none, 6 mlp`; groups count as full."""
    counts: Counter[str] = Counter()
    for run in policy.split(","):
        choice, _, number = run.partition("*")
        named = choice.removeprefix("selective[").removesuffix("]")
        counts["full" if named.startswith("full") else named] += int(number or 1)
    most = counts.most_common(SHORT_CHOICES)
    words = [f"{number} {choice}" for choice, number in most]
    if rest := counts.total() - sum(number for _, number in most):
        words.append(f"{rest} others")
    return ", ".join(words)


def sums_of_layers(plan: Plan) -> tuple[StageCost, ...] | None:
    """What the records of each stage's layers, embedding and head add up to, under the policy that
    ran in the profile's `measured_step`, for one microbatch.

    The stages' residuals are left out: they are what the measured step showed above these sums.
    None if there is no such step, or if a stage of the plan has other layers than in that step.
    """
    profile, layout, step = plan.profile, plan.layout, plan.profile.measured_step
    stages = range(layout.num_stages)
    if step is None or not all(stage_base(profile, layout, stage).measured for stage in stages):
        return None
    bare = tuple(replace(record, residual_bytes=0, residual_ms=0.0) for record in profile.stages)
    return evaluate(
        replace(profile, stages=bare),
        layout,
        replace(plan.schedule, num_microbatches=step.num_microbatches),
        RecomputePolicy.parse(step.recompute_policy, num_layers=profile.num_layers),
        percentile=plan.imbalance_percentile,
    ).stages
