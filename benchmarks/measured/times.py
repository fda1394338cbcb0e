"""Steps beside measured ones: which rows a parameter was fitted on, which judge, which cannot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run

Data = dict[str, Any]

FITTED, JUDGES, LAUNCHES, ASSUMED = "fitted", "judges", "small layers", "GPUs assumed"
LOGGED_MS = 10.0
"""What Megatron's tests log after every step (timers, memory, norms, zeros of gradients), by which
their steps are longer than a job's; fitted with the host's parameters."""
TESTS = "Megatron-LM's tests"
WIDTH = 4096
"""Hidden size from which arithmetic decides a step, and not launches."""


def point(run: Run, prediction: Prediction) -> Data | None:
    """A run's step, if its source gives one and there is a prediction of it."""
    if run.step_ms is None or not prediction.step_ms:
        return None
    predicted_ms = prediction.step_ms + LOGGED_MS * (run.source == TESTS)
    return {
        "run": run.name,
        "family": run.family,
        "gpu": run.gpu,
        "gpus": prediction.num_gpus,
        "role": role(run),
        "measured_ms": run.step_ms,
        "predicted_ms": round(predicted_ms, 1),
        "error": round(predicted_ms / run.step_ms - 1, 6),
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
    halves = _hosts_half(points)
    for one in points:
        chip = one["gpu"].partition("-")[0]
        family = "MoE" if one["family"].startswith("MoE") else "others"
        said = f"{one['role']}, fitted" if one["run"] in halves else one["role"]
        for key in ((said, chip, family), ("~", chip, "all of these")):
            groups.setdefault(key, []).append(one)
    lines = [_statistics(key, groups[key]) for key in sorted(groups)]
    yield TIMES, STATISTICS, [["all" if cell == "~" else cell for cell in line] for line in lines]
    for name in (FITTED, JUDGES, ASSUMED):
        rows = sorted((p for p in points if p["role"] == name), key=lambda p: (p["gpu"], p["run"]))
        lines = [_line(p) for p in rows]
        yield TITLES[name], HEADER, [line for i, line in enumerate(lines) if line not in lines[:i]]


def _hosts_half(points: Sequence[Data]) -> set[str]:
    """The small tests on H100 that the host's parameters were fitted on: every other one."""
    small = {p["run"] for p in points if p["role"] == LAUNCHES and p["gpu"].startswith("h100")}
    return set(sorted(small)[::2])


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
- *Small layers*: the host decides, whose GPU waits for launches. Of those on H100 every other one,
  by name, is *fitted*: the host's three parameters, and 10 ms for what Megatron's tests log after
  every step, which are added to all of theirs. Runs of equal flags on H100 differ by up to 1.6
  times, on one cluster 25 times; no parameter of a GPU can say which host a test had.
- *GPUs assumed*: chosen by the bytes between steps; an error may be that of the choice.

The 7B runs of Megatron's tests have `--deterministic-mode`. On Blackwell a deterministic job with
dropout takes flash-attn, as its bytes show, which reaches 0.39 of cuDNN's rate there (sources in
meta/devices.json). How much slower its deterministic backward is, is in no source that was found,
and not counted: 1.5 times would explain what is missing at four stages. In small tests on GB200
whose name ends in `1node` a step takes 5 to 20 times as long as in the same test on two nodes.
"""
TITLES = {
    FITTED: "### Fitted\n",
    JUDGES: "### Not fitted\n",
    ASSUMED: "### GPUs assumed\n",
}
