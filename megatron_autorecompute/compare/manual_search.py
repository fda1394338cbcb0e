"""Decides which of Megatron's own settings the manual search must run.

A setting that recomputes the same as another one, and more, takes longer. If the other one fits,
there is no need to run it. So the search begins with the settings that recompute least and ends
early, and it never skips the fastest setting that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.work_order import contains, reruns


@dataclass(frozen=True, slots=True)
class NotTried:
    """A setting that was not run."""

    name: str
    """As in the table: `block/5`, `selective[core_attn+mlp]`."""
    reason: str
    """A clause: why it cannot be the fastest that fits, or cannot be run."""


def reruns_more(larger: RecomputePolicy, smaller: RecomputePolicy) -> bool:
    """Whether every layer recomputes all that it does under `smaller`, and some layer more."""
    pairs = [pair for pair in zip(larger.layers, smaller.layers, strict=True) if not _equal(*pair)]
    return bool(pairs) and all(contains(*pair) for pair in pairs)


def _equal(one: LayerPolicy, other: LayerPolicy) -> bool:
    """Whether a layer recomputes and offloads the same at both."""
    again = [(c.inner, c.offload, c.keep, c.rerun_all) for c in (one, other)]
    if one.granularity == other.granularity == "full":
        return again[0] == again[1]
    inside = "full" not in (one.granularity, other.granularity)
    return again[0][:2] == again[1][:2] and inside and reruns(one) == reruns(other)


def needless(policy: RecomputePolicy, fitting: Mapping[str, RecomputePolicy]) -> str | None:
    """Why a setting need not be run, naming one of `fitting` that recomputes less; else None."""
    smaller = next((name for name, other in fitting.items() if reruns_more(policy, other)), None)
    return None if smaller is None else f"reruns all that {smaller} reruns, which fits, and more"
