"""Steps beside measured ones: which rows a parameter was fitted on, which judge, which cannot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured.machines import AWS
from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run
from benchmarks.measured.spread import Spread
from scripts.tables import markdown

Data = dict[str, Any]

FITTED, JUDGES, LAUNCHES, ASSUMED = "fitted", "judges", "small layers", "GPUs assumed"
CHECKS = "checks itself"
ALL = "all"
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


def section(points: Sequence[Data]) -> list[str]:
    """The section of the page: what rows are, and their statistics by role."""
    lines = _by_role(points)
    kept = [line for line in lines if line[0] in (FITTED, JUDGES, ALL)]
    return [TIMES, markdown(STATISTICS, kept)]


def rows(points: Sequence[Data]) -> list[str]:
    """Statistics of all groups, how machines differ, and a line for each step."""
    parts = ["## Steps: statistics\n", markdown(STATISTICS, _by_role(points)), APART]
    parts += [markdown(EQUAL_FLAGS, _equal_flags(points)), MACHINES, UNTOLD]
    return [*parts, markdown(RECORDINGS, _recordings(points)), *_steps(points)]


def _by_role(points: Sequence[Data]) -> list[list[str]]:
    groups: dict[tuple[str, str, str], list[Data]] = {}
    for one in points:
        chip = one["gpu"].partition("-")[0]
        family = "MoE" if one["family"].startswith("MoE") else "others"
        said = one["role"] + ", fitted" * fitted(one) + ", one node" * (ONE_NODE in one["run"])
        said += f", {one['machine']}" * (one["machine"] == AWS)
        groups.setdefault((said, chip, family), []).append(one)
        if one["role"] != CHECKS:
            groups.setdefault((f"~{ALL}", chip, "all of these"), []).append(one)
            if one["added"]:
                groups.setdefault((f"~{ALL} added rows", chip, "all of these"), []).append(one)
    lines = [_statistics(key, groups[key]) for key in sorted(groups)]
    return [[cell.removeprefix("~") for cell in line] for line in lines]


def _steps(points: Sequence[Data]) -> Iterator[str]:
    for name in (FITTED, JUDGES, ASSUMED):
        own = sorted((p for p in points if p["role"] == name), key=lambda p: (p["gpu"], p["run"]))
        lines = [_line(p) for p in own]
        once = [line for number, line in enumerate(lines) if line not in lines[:number]]
        yield TITLES[name]
        yield markdown(HEADER, once)


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

**Measured** steps are the sources': SimuMax's own, and the median of the second half of Megatron's
tests. **Predicted** steps are modelled without a device ([how](decisions/time-model.md)) and
include the optimizer and the data-parallel collectives. Errors are absolute, except the worst.

- *Fitted*: a parameter was fitted on the row.
- *Judges*: nothing was fitted, the number of GPUs is known, and the hidden size is 4,096 or more.
- *All* also has tests with small layers, in which the GPU waits for its host. It also has rows
  whose number of GPUs is not published and was inferred from the bytes between steps.

[The file of rows](../benchmarks/results/measured.md#steps-statistics) has all groups, and what is
not explained.
"""
UNTOLD = """Not explained, or not modelled:

- The 7B runs of Megatron's tests are deterministic. Their backward of attention is
  slower, and no source says by how much, so it is not counted. A factor of 1.5 would explain what
  is missing at four stages.
- Hosts differ by up to 1.6 times: GitHub's runners, at AWS, are slower than NVIDIA's own cluster,
  and the hosts of A100's and GB200's tests are as slow. Small tests on GB200 whose name ends in
  `1node` take 5 to 20 times as long as the same test on two nodes.
- The Python of EP overlap's schedule is not modelled.
- One test with experts on eight ranks (`ep8`) takes longer than predicted. The same test with
  Muon does not, but Muon's own time is predicted too long. No cause was found.
- Two tests whose name has `frozen` take 1.2 and 1.45 times as long as those of equal flags
  without.
- Two runs of October 2025 on another cluster swing between 0.3 and 11 s a step.
"""
APART = """- *Small layers*: the host decides, because the GPU waits for launches. *Fitted* among
  them are three parameters of H100's host, and one factor on these three for H100 at AWS, for A100
  and for GB200 (`python -m benchmarks.measured.hosts`).
- *Checks itself*: every step also checks weights, or attention's inputs, over all ranks and waits
  for the result (`--check-weight-hash-across-dp-replicas-interval 1`, `--test-mode`). That is no
  training, so these rows are not among *all*.
- *GPUs assumed*: the number of GPUs was chosen by the bytes between steps. An error may be that of
  the choice.

## Steps: what no parameter of a GPU can say

Steps of one run are steady: on H100 their quartiles are mostly within 2%. Runs of equal flags
differ more, even on one machine:
"""
MACHINES = """Megatron's tests on H100 run in NVIDIA's own cluster, and some of them also at AWS, on
GitHub's runners. Runs recorded with two commits took 1.42 to 1.61 times as long as those of equal
flags in a third, in each of nine sets; their containers do not explain it, so their machines do. A
commit that rewrote only the values of tests that run on GitHub's runners is taken to come from
there (`megatron_recording_machines.csv`). Predictions of those rows use AWS's host, which is one
factor on NVIDIA's. The date of a row is that of its commit; `megatron_recordings.csv` says which
commit's run the values are of.
"""
TITLES = {
    FITTED: "## Steps: fitted\n",
    JUDGES: "## Steps: not fitted\n",
    ASSUMED: "## Steps: GPUs assumed\n",
}
