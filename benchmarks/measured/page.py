"""docs/measured-runs.md and every row behind it, from the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.measured import times
from benchmarks.measured.results import Data
from benchmarks.measured.spread import Spread
from scripts.tables import markdown

PICTURE = "pictures/measured.svg"


def text(data: Data) -> str:
    """The page: what rows are, and statistics."""
    parts = [INTRODUCTION.format(core=data["megatron-core"]), _counted(data)]
    parts += [markdown(STATISTICS, _all_statistics(data))]
    parts += [f"![predicted against measured peaks]({PICTURE})\n"]
    parts += times.section(data["times"])
    parts += [RATIOS, _ratios(data["ratios"])] if data.get("ratios") else []
    return "\n".join(parts)


def rows(data: Data) -> str:
    """The tables that have a line for each row."""
    parts = [ROWS]
    for name, own in by_family(judged(data)).items():
        parts += [f"## {name[0].upper()}{name[1:]}\n", _family(own)]
    parts += [OPEN, *times.rows(data["times"])]
    parts += ["## Rows that do not suffice\n", NOT_JUDGED, _not_judged(data["points"])]
    parts += ["## Not covered\n", NOT_COVERED, _uncovered(data["uncovered"])]
    return "\n".join(parts)


def summary(data: Data) -> str:
    """For the terminal."""
    return _counted(data) + markdown(STATISTICS, _all_statistics(data))


def judged(data: Data) -> list[Data]:
    """Points whose rows say enough."""
    return [point for point in data["points"] if not point["doubt"]]


def by_family(points: Sequence[Data]) -> dict[str, list[Data]]:
    """Points by family, families in the order of their names."""
    names = sorted({point["family"] for point in points})
    return {name: [p for p in points if p["family"] == name] for name in names}


WITHOUT_EXPERTS = ("dense", "context parallel")
LARGE_BYTES = 4_000_000_000
STATISTICS = ("family", "peaks", "median", "90th percentile", "worst", "mean, signed")


def _all_statistics(data: Data) -> list[list[str]]:
    """Of every family, of all and of large runs without experts, and of every point, those whose
    rows do not suffice included."""
    rows = by_family(judged(data))
    moe = [p for name, own in rows.items() for p in own if name.startswith("MoE")]
    if moe:
        rows["MoE, all"] = moe
    if second := [point for p in judged(data) if (point := _second_step(p))]:
        rows["MoE, second step logged"] = second
    without = [p for name, own in rows.items() for p in own if name.startswith(WITHOUT_EXPERTS)]
    if without:
        rows["dense and context parallel, all"] = without
    if large := [point for point in without if point["measured_bytes"] > LARGE_BYTES]:
        rows["dense and context parallel above 4 GB"] = large
    if added := [point for point in without if point["added"]]:
        rows["dense and context parallel, added rows"] = added
    if added := [point for point in moe if point["added"]]:
        rows["MoE, added rows"] = added
    for kind in ("MoE", "context parallel"):
        if first := [point for p in judged(data) if (point := _first_step(p, kind))]:
            rows[f"{kind}, first step"] = first
    if data["points"]:
        rows["all, with rows that do not suffice"] = data["points"]
    return [_statistics(*of) for of in rows.items()]


def _first_step(point: Data, kind: str) -> Data | None:
    """A point of this kind by the peak of its first step, when a router has learned nothing and no
    block was late to be free."""
    measured, found = point.get("first_step_bytes"), point.get("predicted_first_step_bytes")
    if not point["family"].startswith(kind) or not measured or not found:
        return None
    return {**point, "error": found / measured - 1}


def _second_step(point: Data) -> Data | None:
    """A point by the peak of the second step that was logged, the first or fifth with Adam's
    moments: what grows after it is how tokens are routed, and blocks."""
    measured = point.get("second_step_bytes")
    return measured and {**point, "error": point["predicted_bytes"] / measured - 1}


def _statistics(name: str, rows: Sequence[Data]) -> list[str]:
    own = Spread.of(row["error"] for row in rows)
    sizes = (f"{own.median:.2%}", f"{own.percentile_90:.2%}")
    return [name, str(own.rows), *sizes, f"{own.worst:+.2%}", f"{own.signed_mean:+.2%}"]


def _counted(data: Data) -> str:
    lines = (
        f"{tier or 'no tier'}: {covered} of {total} rows ({covered / total:.0%})"
        for tier, (covered, total) in data["rows"].items()
    )
    return "Covered: " + "; ".join(lines) + ".\n\n"


FAMILY = ("run", "GPUs", "stage", "measured GB", "predicted GB", "error", "others", "peak at")


def _family(rows: Sequence[Data]) -> str:
    ordered = sorted(rows, key=lambda row: (row["tier"], row["run"], row["gpus"], row["stage"]))
    lines: dict[tuple[str, ...], int] = {}
    for row in ordered:
        cells = (
            f"{row['run']}",
            f"{row['gpus']}" + "" * row["gpus_said"] + " (assumed)" * (not row["gpus_said"]),
            str(row["stage"]),
            f"{row['measured_bytes'] / 1e9:.3f}",
            f"{row['predicted_bytes'] / 1e9:.3f}",
            f"{row['error']:+.2%}",
            ", ".join(f"{name} {error:+.2%}" for name, error in row["others"].items()),
            row["moment"],
        )
        lines[cells] = lines.get(cells, 0) + 1
    return markdown(FAMILY, (list(cells) for cells in lines))


def _not_judged(points: Sequence[Data]) -> str:
    rows = sorted((p for p in points if p["doubt"]), key=lambda p: (p["tier"], p["run"]))
    return markdown(
        ("run", "measured GB", "predicted GB", "error", "why"),
        (
            [
                f"{row['run']} [{row['tier']}]",
                f"{row['measured_bytes'] / 1e9:.3f}",
                f"{row['predicted_bytes'] / 1e9:.3f}",
                f"{row['error']:+.2%}",
                row["doubt"],
            ]
            for row in rows
        ),
    )


def _ratios(rows: Sequence[Data]) -> str:
    lines = [
        [
            row["job"],
            row["setting"],
            row["base"],
            f"{row['published']:.3f}",
            f"{row['predicted']:.3f}",
            f"{row['predicted'] / row['published'] - 1:+.1%}",
            row["source"],
        ]
        for row in rows
    ]
    return markdown(RATIO, lines)


def _uncovered(rows: Iterable[Data]) -> str:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row["reason"], []).append(f"{row['name']} [{row['tier']}]")
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = ([reason, str(len(names)), ", ".join(names)] for reason, names in ordered)
    return markdown(("reason", "rows", "which"), lines)


INTRODUCTION = """# Predictions against measured runs

Written by `make measured` (`python -m benchmarks.measured`, megatron-core {core}) from
`benchmarks/data/`. [A file of its own](../benchmarks/results/measured.md) has every row, and says
[what is open](../benchmarks/results/measured.md#what-is-open): routing that is not even, a job from
a checkpoint, blocks.

- **Measured**: torch's peak of allocated bytes since the process began, as the sources give it.
- **Predicted**: this package's peak for the same flags on the same number of GPUs, without a
  device, plus what torch's blocks add ([how](decisions/bytes.md)). Nothing in it is fitted to a
  row.
- Median and percentile are of absolute errors. A GB is 10^9 bytes.

The rows come from three tables:

- `megatron_golden_memory.csv`: golden values of Megatron-LM's functional tests. Each row names its
  file and commit. The values are those of the last rank, and so of the last pipeline stage.
- `megatron_golden_memory_added.csv`: all other golden values with memory in Megatron-LM cf3b8ee60.
  They were added after the model was done, so they only judge it.
- `b200_measured.csv`: the runs on eight B200 that MooreThreads/SimuMax publishes, with SimuMax's
  own predictions. A row has the largest peak of its stage's ranks.

Tier A is above 4 GB, and tier B above 0.8 GB. Tier C is the rest, and all runs on A100.
"""
OPEN = """## What is open

These bytes are missing. None of it is fitted.

- **Routing.** Predictions assume even routing, and no MoE row of Megatron's tests forces it. The
  names of the families say what evens it: Sinkhorn's assignment at once, an auxiliary loss or an
  expert's bias by training, or nothing. "MoE, first step" compares the peak of the first step, in
  which Adam has no moments yet. "MoE, second step logged" compares the first peak with these
  moments. What grows later is routing and blocks: 1.7 GB in jobs with fp8 experts, 1.0 GB in the
  proxies of DeepSeek-V3, 17.4 GB in Nemotron 3.5 Lightning on 8 GB200.
- **Mixtral from a checkpoint**: 0.8 to 1.0 GB on H100 in every step, and 2.1 GB on A100. No cause
  was found. On H100 as much would be missing if an expert of the last rank got 7 to 9% more tokens
  than even routing gives it.
- **Fused cross entropy, first step**: up to 128 MB. torch's inductor makes a tensor of the L2
  cache's size when it times compiled code (torch/_inductor/runtime/benchmarking.py). On A100 in
  containers of 2025 0.5 and 0.9 GB are missing; those rows are not judged.
- **Blocks.** Runs of equal flags differ by up to 13 MB. Under context parallelism a run's peak may
  grow for tens of steps; "context parallel, first step" is from before that growth.
- **Llama3-70B SFT in fp8 and Moonlight on H100**, of Bridge's texts, are in [another
  file](nvidia_recipes.md#against-measured-peaks), because no file has these runs' flags. Both are
  predicted too high. For Llama3-70B at tp 4 two terms are unknown: whether gradients of logits
  waited for the pipeline to drain, and whether transposes of fp8 weights were kept. Without both
  the rows hold. For Moonlight it is unknown whether FusedAdam copied moments to fp32, as
  Transformer Engine before 2.14 does. A memory snapshot of the last rank in one step, with the
  versions, would decide all three.
- **Two runs that continue a checkpoint** ("reshard_2x1x4"): 0.05 and 0.1 GB, and in no later step.
  Loading is the likely cause.
- **Nemotron 3.5 Lightning between steps**: 347 MB. With `--grad-reduce-in-bf16` a step makes fp32
  main gradients of shards, which would be 292 MB of it (read in distrib_optimizer.py, not run).
- **Fine-grained offload beside EP overlap**: 15 MB on H100 and 62 MB on GB200 in the first step
  after Megatron's warm-up. Routing adds the rest by the 26th step. The step's time is not
  predicted.
- **CUDA graphs.** torch reports the bytes of their pool only during capture. One run has its peak
  there, and its pool is predicted right. Replays are compared without what the graphs of small
  layers keep between steps, because it is not predicted.
- **T5 with scores**: 100 to 135 MB of the release tests' 7 GB. One recording of grouped products
  on A100 has 82 MB less than another of the same model.
"""
ROWS = """# Every row behind docs/measured-runs.md

Written by `make measured`. [The page](../../docs/measured-runs.md) says what the columns mean.
"""
NOT_JUDGED = """These rows are in no statistics but the last line's: another run of the same flags
on the same GPUs measured something else, the run is not of these flags, or its quantisation is in
a file that is not public (`benchmarks/measured/doubts.py`).
"""
RATIO = ("job", "setting", "to", "published", "predicted", "error", "source")
RATIOS = """### Steps with a setting to steps without

What a choice costs is a ratio of two steps. The published ratios are of measured steps, or of
throughput where steps are not given. The predicted ones include the optimizer on both sides.
"""
NOT_COVERED = """A reason is the reader's, the package's or Megatron's own.
`python -m benchmarks.measured --rows FILE.csv -o FOLDER` reads more rows of the same columns.
"""
