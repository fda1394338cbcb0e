"""What every choice costs on one layer of a kind, as a table for a job's dashboards."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import ChoiceRecord
from megatron_autorecompute.report.words import duration, size

COSTS = (
    "layers",
    "how many",
    "choice",
    "in the plan",
    "held_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "forward_ms",
    "backward_ms",
    "spread_ms",
    "source",
)
"""Columns of `cost_rows`."""


def cost_rows(plan: Plan) -> list[list[str | int | float]]:
    """What one layer of every kind costs under every choice, for one microbatch, as measured.

    "in the plan": how many layers of the kind have the choice, groups of several layers included.
    """
    rows: list[list[str | int | float]] = []
    for kind in plan.profile.kinds:
        chosen = [plan.recompute_policy[layer] for layer in kind.layers]
        for record in kind.choices:
            count = sum(_is_of(kind.inert.get(choice, choice), record) for choice in chosen)
            rows.append([kind.name, len(kind.layers), record.choice, count, *_figures(record)])
    for name, record in (("embedding", plan.profile.embedding), ("head", plan.profile.head)):
        rows.append([name, 1, record.choice, 1, *_figures(record)])
    return rows


def _is_of(choice: str, record: ChoiceRecord) -> bool:
    """Whether a layer's choice is a record's; that of `full` is also of layers in a group."""
    return choice == record.choice or (record.choice == "full" and choice.startswith("full/"))


def _figures(record: ChoiceRecord) -> Iterator[str | int | float]:
    yield from (getattr(record, name) for name in COSTS[4:])


def costs_markdown(plan: Plan) -> str:
    """`cost_rows` as a Markdown table."""
    heads = [name.removesuffix("_bytes").removesuffix("_ms").replace("_", " ") for name in COSTS]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in cost_rows(plan):
        cells = [_cell(name, value) for name, value in zip(COSTS, row, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, value: str | int | float) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if name.endswith("_bytes"):
        return size(value)
    return duration(value) if name.endswith("_ms") else str(value)
