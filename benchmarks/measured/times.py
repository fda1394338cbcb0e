"""Steps beside measured ones: which rows a parameter was fitted on, which judge, which cannot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run

Data = dict[str, Any]

FITTED, JUDGES, LAUNCHES, ASSUMED = "fitted", "judges", "small layers", "GPUs assumed"
HASHES = "weights hashed"
SLOWER_HOST = 1.3
"""How much longer steps of small layers take in two of Megatron's recordings on H100; fitted with
the host's parameters."""
SLOWER_RECORDINGS = ("5fe3f0665", "cd4afffa6")
FITTED_HOSTS, ONE_NODE = ("a100", "h100", "gb200"), "1node"
"""Chips whose hosts were fitted, and what marks tests on GB200 that were not taken for it."""
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
        "host_error": round(_on_its_host(run) * predicted_ms / run.step_ms - 1, 6),
        "others": {n: round(ms / run.step_ms - 1, 6) for n, ms in run.other_step_ms.items()},
    }


def _on_its_host(run: Run) -> float:
    """What the prediction is multiplied by for the host of a recording."""
    slower = run.recorded_with in SLOWER_RECORDINGS and role(run) == LAUNCHES
    return SLOWER_HOST if slower else 1.0


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
    halves = _hosts_half(points)
    for one in points:
        chip = one["gpu"].partition("-")[0]
        family = "MoE" if one["family"].startswith("MoE") else "others"
        fitted = one["run"] in halves and not one["added"]
        said = f"{one['role']}, fitted" if fitted else one["role"]
        said += ", one node" * (ONE_NODE in one["run"])
        groups.setdefault((said, chip, family), []).append(one)
        if one["role"] != HASHES:
            groups.setdefault(("~", chip, "all of these"), []).append(one)
            if one["added"]:
                groups.setdefault(("~ added rows", chip, "all of these"), []).append(one)
    lines = [_statistics(key, groups[key]) for key in sorted(groups)]
    yield TIMES, STATISTICS, [[cell.replace("~", "all") for cell in line] for line in lines]
    yield APART, EQUAL_FLAGS, _equal_flags(points)
    before = UNTOLD
    for name in (FITTED, JUDGES, ASSUMED):
        rows = sorted((p for p in points if p["role"] == name), key=lambda p: (p["gpu"], p["run"]))
        lines = [_line(p) for p in rows]
        once = [line for number, line in enumerate(lines) if line not in lines[:number]]
        yield before + TITLES[name], HEADER, once
        before = ""


def _hosts_half(points: Sequence[Data]) -> set[str]:
    """The small tests that the hosts' parameters were fitted on: every other one of a GPU."""
    half: set[str] = set()
    small = [p for p in points if p["role"] in (LAUNCHES, HASHES)]
    for chip in FITTED_HOSTS:
        names = {p["run"] for p in small if p["gpu"].startswith(chip) and not p["added"]}
        half.update(sorted(name for name in names if ONE_NODE not in name)[::2])
    half -= {p["run"] for p in small if p["role"] == HASHES}
    return half


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


EQUAL_FLAGS = ("GPU", "sets of runs", "longest to shortest, median", "largest")
STATISTICS = (
    *("rows", "GPU", "models", "steps", "mean", "median", "worst"),
    *("median, hosts apart", "SimuMax's mean"),
)


def _statistics(key: tuple[str, str, str], rows: Sequence[Data]) -> list[str]:
    sizes = [abs(row["error"]) for row in rows]
    apart = [abs(row["host_error"]) for row in rows]
    theirs = [abs(row["others"]["SimuMax"]) for row in rows if "SimuMax" in row["others"]]
    worst = max((row["error"] for row in rows), key=abs)
    return [
        *key,
        str(len(rows)),
        f"{statistics.fmean(sizes):.1%}",
        f"{statistics.median(sizes):.1%}",
        f"{worst:+.1%}",
        f"{statistics.median(apart):.1%}" if apart != sizes else "",
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
  by name, is *fitted*: four parameters of the host, and by how much it was slower in two
  recordings (below). Of those on GB200 likewise two, with a hook as a module, without the tests on
  one node; of those on A100 one factor for those that H100 had before.
- *Hosts apart*: the median error if predictions for these two recordings are multiplied by that
  factor, 1.3. It is no GPU's, and no plan has it.
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
UNTOLD = """
The date of a row is that of its commit, which for half of the small tests on H100 (36 of 70) and
on GB200 (32 of 57) only rewrote the file. By the history of each file, runs on H100 that were
recorded with Megatron-LM 5fe3f0665 (2026-05-07) or cd4afffa6 (2026-07-25) took 1.42 to 1.61 times
as long as those recorded with 4e85d74ae (2026-04-14), in each of nine sets. The container is not
why: tests of 2026-05-14 in that of 2026-05-07 took 1.04 to 1.07 times as long, and those on GB200
of 2026-05-19 0.84 to 0.88 times. What is left is the machine, which no row names
(`megatron_recordings.csv` has the recording of every row on H100). Fitted beside the host's
parameters, on the same half, a factor for the two recordings is 1.3.

The other errors on H100, by cause, hosts apart:

- The Python of EP overlap's schedule is not in the model.
- Two tests whose name has `frozen` take 1.2 and 1.45 times as long as those of equal flags without.
- Two runs of October 2025 on another cluster swing between 0.3 and 11 s a step.

"""
TITLES = {
    FITTED: "### Fitted\n",
    JUDGES: "### Not fitted\n",
    ASSUMED: "### GPUs assumed\n",
}
