"""Steps beside measured ones: which rows a parameter was fitted on, which judge, which cannot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run
from benchmarks.measured.spread import Spread

Data = dict[str, Any]

FITTED, JUDGES, LAUNCHES, ASSUMED = "fitted", "judges", "small layers", "GPUs assumed"
HASHES = "weights hashed"
LONGEST_FITTED_MS = 4500
ONE_NODE = "1node"
NOT_FITTED = (ONE_NODE, "muon", "a2a_ovlp")
"""Parts of names of small tests that hosts were not fitted on, beside those with longer steps."""
ENOUGH = 3
"""Other tests of a recording that say how fast its machine was."""
WIDTH = 4096
"""Hidden size from which arithmetic decides a step, and not launches."""


def point(run: Run, prediction: Prediction) -> Data | None:
    """A run's step, if its source gives one and there is a prediction of it."""
    if run.step_ms is None or not prediction.step_ms:
        return None
    predicted_ms = prediction.step_ms
    return {
        "run": run.name,
        "family": run.family,
        "gpu": run.gpu,
        "gpus": prediction.num_gpus,
        "role": role(run),
        "added": run.added,
        "measured_ms": run.step_ms,
        "predicted_ms": round(predicted_ms, 1),
        "error": round(predicted_ms / run.step_ms - 1, 6),
        "recorded_with": run.recorded_with,
        "others": {n: round(ms / run.step_ms - 1, 6) for n, ms in run.other_step_ms.items()},
    }


def role(run: Run) -> str:
    """What a run is for. devices.json says the same of those that were fitted."""
    if run.source == "SimuMax" and run.name.startswith("llama3_70b") and "_cp" not in run.name:
        return FITTED
    if len(run.worlds) > 1:
        return ASSUMED
    if run.hashes_weights:
        return HASHES
    return JUDGES if width(run.flags) >= WIDTH else LAUNCHES


def width(flags: Sequence[str]) -> int:
    """--hidden-size."""
    return int(flags[flags.index("--hidden-size") + 1])


def section(points: Sequence[Data]) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Tables: what stands before one, its header, its rows."""
    groups: dict[tuple[str, str, str], list[Data]] = {}
    points = on_their_machines(points)
    for one in points:
        chip = one["gpu"].partition("-")[0]
        family = "MoE" if one["family"].startswith("MoE") else "others"
        said = one["role"] + ", fitted" * _fitted(one) + ", one node" * (ONE_NODE in one["run"])
        groups.setdefault((said, chip, family), []).append(one)
        if one["role"] != HASHES:
            groups.setdefault(("~", chip, "all of these"), []).append(one)
            if one["added"]:
                groups.setdefault(("~ added rows", chip, "all of these"), []).append(one)
    lines = [_statistics(key, groups[key]) for key in sorted(groups)]
    yield TIMES, STATISTICS, [[cell.replace("~", "all") for cell in line] for line in lines]
    yield APART, EQUAL_FLAGS, _equal_flags(points)
    yield MACHINES, RECORDINGS, _recordings(points)
    before = UNTOLD
    for name in (FITTED, JUDGES, ASSUMED):
        rows = sorted((p for p in points if p["role"] == name), key=lambda p: (p["gpu"], p["run"]))
        lines = [_line(p) for p in rows]
        once = [line for number, line in enumerate(lines) if line not in lines[:number]]
        yield before + TITLES[name], HEADER, once
        before = ""


def on_their_machines(points: Sequence[Data]) -> list[Data]:
    """Points with the error that is left once a recording's machine is known: the prediction of a
    small test times what other tests of its recording took longer than predicted, their median."""
    small = [p for p in points if p["role"] == LAUNCHES and p["recorded_with"]]
    found = []
    for one in points:
        others = [
            p["measured_ms"] / p["predicted_ms"]
            for p in small
            if _recording(p) == _recording(one) and p["run"] != one["run"]
        ]
        known = one in small and len(others) >= ENOUGH
        factor = statistics.median(others) if known else 1.0
        error = factor * one["predicted_ms"] / one["measured_ms"] - 1
        found.append({**one, "machine_error": error})
    return found


def _recording(one: Data) -> tuple[str, str]:
    return one["gpu"], one["recorded_with"]


def _fitted(one: Data) -> bool:
    """Whether the host's parameters were fitted on a test."""
    small = one["role"] == LAUNCHES and one["measured_ms"] <= LONGEST_FITTED_MS
    return small and not any(name in one["run"] for name in NOT_FITTED)


def _equal_flags(points: Sequence[Data]) -> list[list[str]]:
    """Of every GPU, how far apart steps of runs with equal flags are."""
    sets: dict[tuple[str, str, float], list[float]] = {}
    for one in points:
        key = one["gpu"].partition("-")[0], one["run"], one["predicted_ms"]
        sets.setdefault(key, []).append(one["measured_ms"])
    ratios: dict[str, list[float]] = {}
    for (chip, *_), steps in sets.items():
        if len(steps) > 1:
            ratios.setdefault(chip, []).append(max(steps) / min(steps))
    return [
        [chip, str(len(own)), f"{statistics.median(own):.2f}", f"{max(own):.1f}"]
        for chip, own in sorted(ratios.items())
    ]


def _recordings(points: Sequence[Data]) -> list[list[str]]:
    """Of every recording with enough small tests, how much longer they took than predicted."""
    groups: dict[tuple[str, str], list[Data]] = {}
    for one in points:
        if one["role"] == LAUNCHES and one["recorded_with"]:
            groups.setdefault(_recording(one), []).append(one)
    lines = []
    for (_, commit), rows in groups.items():
        ratio = statistics.median(row["measured_ms"] / row["predicted_ms"] for row in rows)
        left = statistics.median(abs(row["machine_error"]) for row in rows)
        if len(rows) > ENOUGH:
            lines.append([commit, str(len(rows)), f"{ratio:.2f}", f"{left:.1%}"])
    return sorted(lines, key=lambda line: line[2])


RECORDINGS = ("recorded with", "tests", "measured to predicted, median", "median error, known")
EQUAL_FLAGS = ("GPU", "sets of runs", "longest to shortest, median", "largest")
STATISTICS = (
    *("rows", "GPU", "models", "steps", "mean", "median", "worst"),
    *("median, machine known", "SimuMax's mean"),
)


def _statistics(key: tuple[str, str, str], rows: Sequence[Data]) -> list[str]:
    own = Spread.of(row["error"] for row in rows)
    known = Spread.of(row["machine_error"] for row in rows)
    theirs = [row["others"]["SimuMax"] for row in rows if "SimuMax" in row["others"]]
    return [
        *key,
        str(own.rows),
        f"{own.mean:.1%}",
        f"{own.median:.1%}",
        f"{own.worst:+.1%}",
        f"{known.median:.1%}" if any(row["recorded_with"] for row in rows) else "",
        f"{Spread.of(theirs).mean:.1%}" if theirs else "",
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
- *Small layers*: the host decides, whose GPU waits for launches. *Fitted*: three parameters of
  H100's host, and one factor for those of A100 and GB200.
- *Machine known*: the median error if the prediction of a small test on H100 is multiplied by what
  the other tests of its recording say of their machine: the median of how much longer than
  predicted they took, where there are three. It is no GPU's, and no plan has it.
- *Weights hashed*: `--check-weight-hash-across-dp-replicas-interval 1` has every step copy all
  weights to the CPU and take their SHA-1 (megatron-core utils.py), which is no training: not among
  *all*.
- *GPUs assumed*: chosen by the bytes between steps; an error may be that of the choice.

The 7B runs of Megatron's tests have `--deterministic-mode`. On Blackwell a deterministic job with
dropout takes flash-attn, as its bytes show, which reaches 0.39 of cuDNN's rate there (sources in
meta/devices.json). How much slower its deterministic backward is, is in no source that was found,
and not counted: 1.5 times would explain what is missing at four stages. In small tests on GB200
whose name ends in `1node` a step takes 5 to 20 times as long as in the same test on two nodes.
"""
APART = """### What no parameter of a GPU can say

Steps of one run are steady: on H100 their quartiles are mostly within 2%. Runs of equal flags are
not:

"""
MACHINES = """
The date of a row is that of its commit, which for half of the small tests on H100 only rewrote the
file; `megatron_recordings.csv` has the commit whose run a row is of, by the history of its file.
Runs on H100 that were recorded with Megatron-LM 5fe3f0665 (2026-05-07) or cd4afffa6 (2026-07-25)
took 1.42 to 1.61 times as long as those of equal flags recorded with 4e85d74ae (2026-04-14), in
each of nine sets. The container is not why: tests of 2026-05-14 in that of 2026-05-07 took 1.04 to
1.07 times as long. What is left is the machine, which no row names:

"""
UNTOLD = """
Hosts of A100's and GB200's tests are as slow as the slower ones here.

The other errors on H100, by cause:

- The Python of EP overlap's schedule is not in the model.
- One test with experts on eight ranks (`ep8`) takes 1.3 to 2.2 times as long as predicted, on A100
  and GB200, too; with Muon it does not, whose own time is then predicted as too long. No cause was
  found.
- Two tests whose name has `frozen` take 1.2 and 1.45 times as long as those of equal flags without.
- Two runs of October 2025 on another cluster swing between 0.3 and 11 s a step.

"""
TITLES = {
    FITTED: "### Fitted\n",
    JUDGES: "### Not fitted\n",
    ASSUMED: "### GPUs assumed\n",
}
