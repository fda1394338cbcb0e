"""Steps beside measured ones: which rows a parameter was fitted on, which judge, which cannot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured.machines import AWS
from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run
from benchmarks.measured.spread import Spread

Data = dict[str, Any]

FITTED, JUDGES, LAUNCHES, ASSUMED = "fitted", "judges", "small layers", "GPUs assumed"
CHECKS = "checks itself"
LONGEST_FITTED_MS = 4500
ONE_NODE = "1node"
NOT_FITTED = (ONE_NODE, "muon", "a2a_ovlp")
"""Parts of names of small tests that hosts were not fitted on, beside those with longer steps."""
ENOUGH = 4
"""Small tests from which on a recording has a line."""
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
        "machine": run.machine,
        "others": {n: round(ms / run.step_ms - 1, 6) for n, ms in run.other_step_ms.items()},
    }


def role(run: Run) -> str:
    """What a run is for. devices.json says the same of those that were fitted."""
    if run.source == "SimuMax" and run.name.startswith("llama3_70b") and "_cp" not in run.name:
        return FITTED
    if len(run.worlds) > 1:
        return ASSUMED
    if run.checks_itself:
        return CHECKS
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
        said = one["role"] + ", fitted" * fitted(one) + ", one node" * (ONE_NODE in one["run"])
        said += f", {one['machine']}" * (one["machine"] == AWS)
        groups.setdefault((said, chip, family), []).append(one)
        if one["role"] != CHECKS:
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


def fitted(one: Data) -> bool:
    """Whether a host's parameters were fitted on a test."""
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
        if one["role"] == LAUNCHES and one["machine"]:
            groups.setdefault((one["recorded_with"], one["machine"]), []).append(one)
    lines = []
    for (commit, machine), rows in groups.items():
        ratio = statistics.median(row["measured_ms"] / row["predicted_ms"] for row in rows)
        middle = statistics.median(abs(row["error"]) for row in rows)
        if len(rows) >= ENOUGH:
            lines.append([commit, machine, str(len(rows)), f"{ratio:.2f}", f"{middle:.1%}"])
    return sorted(lines, key=lambda line: (line[1], line[3]), reverse=True)


RECORDINGS = ("recorded with", "machine", "tests", "measured to predicted, median", "median error")
EQUAL_FLAGS = ("GPU", "sets of runs", "longest to shortest, median", "largest")
STATISTICS = (
    *("rows", "GPU", "models", "steps", "mean", "median", "worst"),
    "SimuMax's mean",
)


def _statistics(key: tuple[str, str, str], rows: Sequence[Data]) -> list[str]:
    own = Spread.of(row["error"] for row in rows)
    theirs = [row["others"]["SimuMax"] for row in rows if "SimuMax" in row["others"]]
    return [
        *key,
        str(own.rows),
        f"{own.mean:.1%}",
        f"{own.median:.1%}",
        f"{own.worst:+.1%}",
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
  H100's host, one factor of them for H100 at AWS, and one for A100 and GB200
  (`python -m benchmarks.measured.hosts`).
- *Checks itself*: `--check-weight-hash-across-dp-replicas-interval 1` has every step copy all
  weights to the CPU and take their SHA-1 (megatron-core utils.py), `--test-mode` has every forward
  gather the norms of queries and keys of all ranks and compare them, the host waiting for each
  (transformer/attention.py `run_realtime_tests`), which is no training: not among *all*.
- *GPUs assumed*: chosen by the bytes between steps; an error may be that of the choice.

The 7B runs of Megatron's tests have `--deterministic-mode`. On Blackwell a deterministic job with
dropout takes flash-attn, as its bytes show, which reaches 0.39 of cuDNN's rate there (sources in
meta/devices.json). How much slower its deterministic backward is, is in no source that was found,
and not counted: 1.5 times would explain what is missing at four stages. In small tests on GB200
whose name ends in `1node` a step takes 5 to 20 times as long as in the same test on two nodes: they
run on four GPUs of GitHub's runners, at AWS (tests/test_utils/recipes/gb200/gpt-1node.yaml).
"""
APART = """### What no parameter of a GPU can say

Steps of one run are steady: on H100 their quartiles are mostly within 2%. Runs of equal flags are
less so, on H100 on one machine:

"""
MACHINES = """
The date of a row is that of its commit, which for half of the small tests on H100 only rewrote the
file; `megatron_recordings.csv` has the commit whose run a row is of, by the history of its file.
Runs on H100 that were recorded with Megatron-LM 5fe3f0665 (2026-05-07) or cd4afffa6 (2026-07-25)
took 1.42 to 1.61 times as long as those of equal flags recorded with 4e85d74ae (2026-04-14), in
each of nine sets. The container is not why: tests of 2026-05-14 in that of 2026-05-07 took 1.04 to
1.07 times as long. What differs is the machine. Megatron's tests on H100 run in NVIDIA's own
cluster, and some of them, those whose scope begins with `mr-github`, at AWS too, on GitHub's
runners (Megatron-LM tests/test_utils/recipes, .github/workflows/cicd-main.yml
`nvidia-ci-aws-gpu-x8`). A commit that rewrote the values of such tests alone is taken to have them
from there (`megatron_recording_machines.csv`): 37 of 37 files in 5fe3f0665, 5 of 5 in cd4afffa6,
92 of 148 in 4e85d74ae. So predictions of these rows are made with AWS's host, which is one number
beside NVIDIA's.

"""
UNTOLD = """
Hosts of A100's and GB200's tests, in other clouds, are as slow as AWS's.

The other errors on H100, by cause:

- The Python of EP overlap's schedule is not in the model.
- One test with experts on eight ranks (`ep8`) takes longer than predicted, on A100
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
