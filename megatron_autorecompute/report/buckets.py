"""The plans of a loop whose microbatches differ, by length, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from megatron_autorecompute.planner.search.buckets import BucketPlan
from megatron_autorecompute.units import gib


def buckets_view(plans: Sequence[BucketPlan]) -> Table:
    """A row for every bucket."""
    table = Table(title="By the largest microbatch of a call, tokens on a rank", box=None)
    for name in ("up to tokens", "of calls", "peak GiB", "step ms", "saves"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for plan in plans:
        fits = plan.policy is not None
        table.add_row(
            f"{plan.tokens:,}",
            "-" if plan.share is None else f"{plan.share:.0%}",
            gib(plan.peak_bytes),
            f"{plan.step_ms:,.0f}" if fits else "-",
            f"{plan.saved:.1%}" if fits else "-",
            plan.policy or "does not fit, even with the leanest choices",
        )
    return table
