"""A comparison as table, Markdown and picture, from its record."""

from __future__ import annotations

from matplotlib.figure import Figure
from rich import box
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from megatron_autorecompute.compare.comparison import Comparison, Family, StrategyResult
from megatron_autorecompute.report.chart import Point, chart
from megatron_autorecompute.units import MIB

_COLOUR: dict[Family, str] = {
    "none": "#777777",
    "selective": "#2f6db3",
    "full": "#8a5fbf",
    "skips": "#3b8f6b",
    "manual": "#d98218",
    "tried": "#e8c79b",
    "ours": "#c8322f",
}
NOISY = 0.2
"""The table warns of noise if the spread of steps over their median is at least this."""
SKIPS = (
    "full, no dead work: our full on every layer. It keeps what Megatron's full keeps, and does "
    "not rerun what no backward reads. Megatron's own rows rerun that work, and our row does not."
)
HEADINGS = ("strategy", "step ms", "spread", "peak MiB", "search s", "fits")


def table(comparison: Comparison) -> Group:
    """One row per strategy, and below the table what each recomputes."""
    shown = Table(
        title=_budget(comparison), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    shown.add_column(HEADINGS[0], overflow="fold")  # a set of modules: no figure is cut off
    for heading in HEADINGS[1:]:
        shown.add_column(heading, justify="right", no_wrap=True)
    policies = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
    for strategy in comparison.rows():
        style = "bold" if strategy.family == "ours" else None
        shown.add_row(*map(Text, cells(comparison, strategy)), style=style)
        policy = Text(strategy.policy.replace(",", ", "))
        policies.add_row(Text(strategy.name), policy, style=style)
    return Group(shown, policies, *map(Text, remarks(comparison)))


def markdown(comparison: Comparison) -> str:
    """The table in Markdown, with what each strategy recomputes as last column."""
    headings = (*HEADINGS, "policy")
    lines = [_budget(comparison), "", f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    for strategy in comparison.rows():
        row = (*cells(comparison, strategy), f"`{strategy.policy}`")
        lines.append(f"| {' | '.join(row)} |")
    for line in remarks(comparison):
        lines += ["", line]
    return "\n".join(lines) + "\n"


def remarks(comparison: Comparison) -> list[str]:
    """What stands below the table: whether times mean little, and what was not tried."""
    times = [(row.spread_ms, row.median_ms) for row in comparison.rows() if row.median_ms]
    share = max((spread / median for spread, median in times), default=0.0)
    noise = (
        f"Step times spread by up to {share:.0%} of their median, as on a busy machine: smaller "
        "differences say nothing. The peaks hold."
    )
    skips = any(row.family == "skips" for row in comparison.rows())
    return [noise] * (share > NOISY) + [SKIPS] * skips + by_hand(comparison)


def by_hand(comparison: Comparison) -> list[str]:
    """Whether none of the settings tried fits; a sentence for each reason why some were skipped."""
    tried = [strategy for strategy in comparison.strategies if strategy.family == "tried"]
    found = []
    if tried and all(map(comparison.exceeds, tried)):
        found = [f"None of the {len(tried)} settings tried by hand fits: there is no row manual."]
    names: dict[str, list[str]] = {}
    for setting in comparison.not_tried:
        names.setdefault(setting.reason, []).append(setting.name)
    return found + [
        f"Not tried by hand: {', '.join(those)}: {reason}." for reason, those in names.items()
    ]


def _budget(comparison: Comparison) -> str:
    if comparison.budget_bytes is None:
        return "Budget not yet set."
    return f"Budget: {comparison.budget_bytes / MIB:,.1f} MiB on every pipeline stage."


def cells(comparison: Comparison, strategy: StrategyResult) -> tuple[str, ...]:
    """One row as text, in the order of `HEADINGS`."""
    median = strategy.median_ms
    time = "-" if median is None else f"{median:,.0f}"
    spread = "-" if median is None else f"{strategy.spread_ms:,.0f}"
    peaks = " / ".join(f"{peak / MIB:,.1f}" for peak in strategy.peak_bytes)
    search = "-" if strategy.search_s is None else f"{strategy.search_s:.1f}"
    return strategy.name, time, spread, peaks, search, fits(comparison, strategy)


def fits(comparison: Comparison, strategy: StrategyResult) -> str:
    """Whether the strategy stays within the budget."""
    if strategy.out_of_memory:
        return "OOM"
    if comparison.budget_bytes is None:
        return ""
    return "NO" if comparison.exceeds(strategy) else "yes"


def chart_of(comparison: Comparison) -> Figure:
    """Step time against the fullest stage's peak, a point per strategy, the budget a line."""
    timed = [strategy for strategy in comparison.strategies if strategy.step_ms]
    timed.sort(key=lambda strategy: strategy.family == "tried")  # stand behind the others
    return chart(list(map(_point, timed)), comparison.budget_bytes, title=_title(comparison))


def _point(strategy: StrategyResult) -> Point:
    """Its bar reaches from the lower to the upper quartile; a setting that was merely tried has
    none."""
    tried, colour = strategy.family == "tried", _COLOUR[strategy.family]
    return Point(
        max(strategy.peak_bytes),
        strategy.median_ms or 0.0,
        tip=strategy.name,
        kind=strategy.family,
        ink=colour,
        radius=3 if tried else 5,
        name=strategy.name,
        colour="#8a6a3a" if tried else colour,
        strong=strategy.family == "ours",
        spread_ms=None if tried else strategy.spread_ms,
    )


def _title(comparison: Comparison) -> str:
    job = comparison.job
    return (
        f"{job.num_layers} layers, hidden {job.hidden_size}, sequence {job.seq_length}, "
        f"{job.pipeline_stages} pipeline stages, {job.num_microbatches} microbatches; "
        f"{comparison.machine.get('device', '')}; bars between quartiles"
    )
