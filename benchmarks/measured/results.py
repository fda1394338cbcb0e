"""What the page is made of, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from benchmarks.measured.doubts import doubts
from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Measured, Run, Unread
from benchmarks.measured.times import point

Data = dict[str, Any]


def results(pairs: Sequence[tuple[Run, Prediction | None]], unread: Iterable[Unread]) -> Data:
    """Predicted stages beside measured ones, and every row that is not covered."""
    points, times, uncovered = [], [], [asdict(row) for row in unread]
    for (run, prediction), doubt in zip(pairs, doubts(pairs), strict=True):
        reason = run.uncovered or (prediction.uncovered if prediction else "")
        if prediction is None or reason:
            uncovered.append({"name": run.name, "tier": run.tier, "reason": reason})
        else:
            points += [_point(run, prediction, one, doubt) for one in run.measured]
            step = point(run, prediction)
            times += [step] if step else []
    return {
        "megatron-core": metadata.version("megatron-core"),
        "points": points,
        "times": times,
        "uncovered": uncovered,
        "rows": rows_by_tier(pairs, uncovered),
    }


def rows_by_tier(
    pairs: Sequence[tuple[Run, Prediction | None]], uncovered: Sequence[Data]
) -> dict[str, list[int]]:
    """Rows that are covered, and all rows, of each tier."""
    tiers = [run.tier for run, _ in pairs]
    lost = [row["tier"] for row in uncovered]
    run_names = {run.name for run, _ in pairs}
    tiers += [row["tier"] for row in uncovered if row["name"] not in run_names]
    return {tier: [tiers.count(tier) - lost.count(tier), tiers.count(tier)] for tier in tiers}


def _point(run: Run, prediction: Prediction, measured: Measured, doubt: str) -> Data:
    stage = prediction.stages[measured.stage]
    return {
        "run": run.name,
        "source": run.source,
        "tier": run.tier,
        "added": run.added,
        "family": run.family,
        "gpu": run.gpu,
        "gpus": prediction.num_gpus,
        "gpus_said": len(run.worlds) == 1,
        "stage": measured.stage % len(prediction.stages),
        "measured_bytes": measured.peak_bytes,
        "between_steps_bytes": run.between_steps_bytes,
        "predicted_bytes": stage.peak_bytes,
        "error": round(stage.peak_bytes / measured.peak_bytes - 1, 6),
        "first_step_bytes": run.first_step_bytes,
        "second_step_bytes": run.second_step_bytes,
        "predicted_first_step_bytes": stage.first_step_bytes,
        "moment": stage.moment,
        "doubt": doubt,
        "parts": stage.parts,
        "others": {
            name: round(value / measured.peak_bytes - 1, 6)
            for name, value in measured.others.items()
        },
    }
