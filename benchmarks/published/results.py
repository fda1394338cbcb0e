"""What the page is made of, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.measured.flags import FieldError
from benchmarks.measured.runs import Unread
from benchmarks.published.runs import PublishedRun, of_recipe

Data = dict[str, Any]

FITTED: tuple[str, ...] = (
    "llama31_405b_pretrain_1024gpu_h100_fp8cs_config",
    *(
        f"llama31_405b_pretrain_256gpu_{gpu}_{precision}_config"
        for gpu in ("gb200", "gb300")
        for precision in ("fp8cs", "fp8mx", "nvfp4")
    ),
)
"""Recipes whose published steps a figure of meta/devices.json was fitted on, by their names."""
CHANGED = {
    "qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config": "CUDA graphs of attention and router since "
    "Bridge b6f644609 (2026-08-06); none in Bridge 0.5.0, which release 26.06 has "
    "(scripts/performance/configs/qwen/qwen3_workload_base_configs.py)",
    "qwen3_30b_a3b_pretrain_8gpu_b200_fp8mx_config": "EP overlap and 64 SMs for HybridEP since "
    "Bridge 9c0cd2575 (2026-08-06), because the exchange was 29% of the kernels' time; neither in "
    "Bridge 0.4.0 to 0.4.2, which releases 26.04 and 26.04.01 are of (same file)",
}
"""Recipes whose setting is not that of their newest published run, by their names: what changed,
and where Bridge says so. Found by reading those that were more than 15% off."""
FITTED_ROLE, CHANGED_ROLE, JUDGES = "fitted", "changed since", "judges"
NO_RECIPE = "no recipe of this name in Bridge of August 2026"


def role(recipe: str) -> str:
    """What a recipe's step is for."""
    if recipe in CHANGED:
        return CHANGED_ROLE
    return FITTED_ROLE if recipe in FITTED else JUDGES


def asked(recipes: Iterable[str], runs: Sequence[PublishedRun], only: str = "") -> list[str]:
    """Recipes with `only` in their name of whose name a run was published, whatever its sizes.

    Raises FieldError if there is none.
    """
    names = [name for name in recipes if only in name and of_recipe(name, runs)]
    if not names:
        raise FieldError(f"no recipe with a published run has {only!r} in its name")
    return names


def results(
    found: Sequence[Data], runs: Sequence[PublishedRun], unread: Iterable[Unread] = ()
) -> Data:
    """Predicted steps beside published ones, and everything published that is not covered.

    Args:
        found: of every recipe that is `asked` what `prediction.predicted` says.
        runs: the published runs that were read.
        unread: rows that could not be read.
    """
    points = [_point(each) for each in found if "reason" not in each]
    uncovered = [each for each in found if "reason" in each] + _without_recipe(found, runs)
    return {
        "points": sorted(points, key=lambda point: point["recipe"]),
        "uncovered": sorted(uncovered, key=lambda each: each["recipe"]),
        "unread": [{"row": row.name, "reason": row.reason} for row in unread],
        "runs": len(runs),
    }


def _point(found: Data) -> Data:
    """Errors are against the newest release; `published` is newest first."""
    measured_s = found["published"][0]["step_s"]
    steps = [{**run, "step_s": round(run["step_s"], 3)} for run in found["published"]]
    return {
        **found,
        "role": role(found["recipe"]),
        "published": steps,
        "predicted_s": round(found["predicted_s"], 3),
        "error": round(found["predicted_s"] / measured_s - 1, 6),
    }


def _without_recipe(found: Iterable[Data], runs: Iterable[PublishedRun]) -> list[Data]:
    names = [each["recipe"] for each in found]
    begins = dict.fromkeys(run.recipe for run in runs)
    lost = [one for one in begins if not any(name.startswith(one) for name in names)]
    return [{"recipe": one.rstrip("_"), "reason": NO_RECIPE} for one in lost]
