"""What a person would try by hand: which of Megatron's own settings are worth a step.

A setting that reruns all that another one reruns, and more, takes longer: where the other one fits,
there is no need to run it. So the search begins with what reruns least and ends early, and never
passes over the fastest setting that fits. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy

RERUN_WITH = {"moe": ("moe_act", "shared_experts")}
"""Modules that a larger one reruns with itself."""


@dataclass(frozen=True, slots=True)
class NotTried:
    """A setting that nobody had to run."""

    name: str
    """As in the table: `block/5`, `selective[core_attn+mlp]`."""
    reason: str
    """A clause: why it cannot be the fastest that fits, or cannot be run."""


def reruns_more(larger: RecomputePolicy, smaller: RecomputePolicy) -> bool:
    """Whether every layer reruns all that it reruns under `smaller`, and some layer more."""
    pairs = list(zip(larger.layers, smaller.layers, strict=True))
    return all(_contains(a, b) for a, b in pairs) and not all(_contains(b, a) for a, b in pairs)


def _contains(larger: LayerPolicy, smaller: LayerPolicy) -> bool:
    """Whether all that a layer reruns at `smaller` runs again at `larger`, too."""
    if larger.granularity == "full":
        return True
    return smaller.granularity != "full" and _modules(smaller) <= _modules(larger)


def _modules(choice: LayerPolicy) -> frozenset[str]:
    """The modules that run again, those within others by their own names, too."""
    within = (RERUN_WITH.get(module, ()) for module in choice.modules)
    return frozenset(choice.modules).union(*within)


def needless(policy: RecomputePolicy, fitting: Mapping[str, RecomputePolicy]) -> str | None:
    """Why a setting needs no trying: the name of one that fits in `fitting` and reruns less."""
    smaller = next((name for name, other in fitting.items() if reruns_more(policy, other)), None)
    return None if smaller is None else f"reruns all that {smaller} reruns, which fits, and more"
