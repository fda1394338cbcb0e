"""Steps beside measured ones: which rows a parameter was fitted on, which judge, which cannot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run

Data = dict[str, Any]

FITTED, JUDGES, LAUNCHES, ASSUMED = "fitted", "judges", "small layers", "GPUs assumed"
WIDTH = 4096
"""Hidden size from which arithmetic decides a step, and not launches."""


def point(run: Run, prediction: Prediction) -> Data | None:
    """A run's step, if its source gives one and there is a prediction of it."""
    if run.step_ms is None or not prediction.step_ms:
        return None
    return {
        "run": run.name,
        "family": run.family,
        "gpu": run.gpu,
        "gpus": prediction.num_gpus,
        "role": role(run),
        "measured_ms": run.step_ms,
        "predicted_ms": round(prediction.step_ms, 1),
        "error": round(prediction.step_ms / run.step_ms - 1, 6),
        "others": {n: round(ms / run.step_ms - 1, 6) for n, ms in run.other_step_ms.items()},
    }


def role(run: Run) -> str:
    """What a run is for. devices.json says the same of those that were fitted."""
    if run.source == "SimuMax" and run.name.startswith("llama3_70b") and "_cp" not in run.name:
        return FITTED
    if len(run.worlds) > 1:
        return ASSUMED
    return JUDGES if width(run.flags) >= WIDTH else LAUNCHES


def width(flags: Sequence[str]) -> int:
    """--hidden-size."""
    return int(flags[flags.index("--hidden-size") + 1])


def section(points: Sequence[Data]) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Tables: what stands before one, its header, its rows."""
    groups: dict[tuple[str, str, str], list[Data]] = {}
    for one in points:
        chip = one["gpu"].partition("-")[0]
        family = "MoE" if one["family"].startswith("MoE") else "others"
        groups.setdefault((one["role"], chip, family), []).append(one)
    yield TIMES, STATISTICS, [_statistics(key, groups[key]) for key in sorted(groups)]
    for name in (FITTED, JUDGES, ASSUMED):
        rows = sorted((p for p in points if p["role"] == name), key=lambda p: (p["gpu"], p["run"]))
        lines = [_line(p) for p in rows]
        yield TITLES[name], HEADER, [line for i, line in enumerate(lines) if line not in lines[:i]]


STATISTICS = ("rows", "GPU", "models", "steps", "mean", "median", "worst", "SimuMax's mean")


def _statistics(key: tuple[str, str, str], rows: Sequence[Data]) -> list[str]:
    sizes = [abs(row["error"]) for row in rows]
    theirs = [abs(row["others"]["SimuMax"]) for row in rows if "SimuMax" in row["others"]]
    worst = max((row["error"] for row in rows), key=abs)
    return [
        *key,
        str(len(rows)),
        f"{statistics.fmean(sizes):.1%}",
        f"{statistics.median(sizes):.1%}",
        f"{worst:+.1%}",
        f"{statistics.fmean(theirs):.1%}" if theirs else "",
    ]


HEADER = ("run", "GPUs", "measured ms", "predicted ms", "error", "others")


def _line(one: Data) -> list[str]:
    return [
        f"{one['run']}" + f" ({one['gpu'].partition('-')[0]})" * ("(" not in one["run"]),
        f"{one['gpus']}" + " (assumed)" * (one["role"] == ASSUMED),
        f"{one['measured_ms']:,.1f}",
        f"{one['predicted_ms']:,.1f}",
        f"{one['error']:+.1%}",
        ", ".join(f"{name} {error:+.1%}" for name, error in one["others"].items()),
    ]


TIMES = """## Times

**Measured** steps are the sources': SimuMax's, and of Megatron's tests the median of the second
half. **Predicted** steps are modelled without a device ([how](decisions/time-model.md)), the
optimizer and data-parallel collectives included. `meta/devices.json` names the source of every
parameter. Errors are absolute, but for the worst.

- *Fitted*: a parameter was fitted on the row.
- *Judges*: none was, the number of GPUs is known, and the hidden size is 4,096 or more.
- *Small layers*: the host decides, whose GPU waits for launches; some tests also wait for data or
  log every parameter's norm. The host's two parameters were fitted on the median of those on H100.
- *GPUs assumed*: chosen by the bytes between steps; an error may be that of the choice.

The 7B runs of Megatron's tests have `--deterministic-mode`. On GB200 they are a third slower than
modelled, and only 1.3 to 1.5 times as fast as on H100. Part of it may be that a deterministic job
with dropout runs flash-attn there, as its bytes show, and the rate of cuDNN's attention is taken
(how much slower flash-attn is on Blackwell is in no source that was found). In small tests on GB200
whose name ends in `1node` a step takes 5 to 20 times as long as in the same test on two nodes.
"""
TITLES = {
    FITTED: "### Fitted\n",
    JUDGES: "### Not fitted\n",
    ASSUMED: "### GPUs assumed\n",
}
