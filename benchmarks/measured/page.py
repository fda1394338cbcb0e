"""docs/measured-runs.md, from the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.measured.results import Data
from benchmarks.measured.spread import Spread
from benchmarks.measured.times import section
from benchmarks.tables import markdown

PICTURE = "pictures/measured.svg"


def text(data: Data) -> str:
    """The whole page."""
    families = by_family(judged(data))
    parts = [INTRODUCTION.format(core=data["megatron-core"]), _counted(data)]
    parts += [markdown(STATISTICS, _all_statistics(data))]
    parts += [f"![predicted against measured peaks]({PICTURE})\n", OPEN]
    for name, rows in families.items():
        parts += [f"## {name[0].upper()}{name[1:]}\n", _family(rows)]
    for before, header, rows in section(data["times"]):
        parts += [before, markdown(header, rows)]
    parts += [_ratios(data["ratios"])] if data.get("ratios") else []
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
    return RATIOS + markdown(RATIO, lines)


def _uncovered(rows: Iterable[Data]) -> str:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row["reason"], []).append(f"{row['name']} [{row['tier']}]")
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = ([reason, str(len(names)), ", ".join(names)] for reason, names in ordered)
    return markdown(("reason", "rows", "which"), lines)


INTRODUCTION = """# Predictions against measured runs

Written by `make measured` (`python -m benchmarks.measured`, megatron-core {core}) from
`benchmarks/data/`. **Measured** peaks are the sources': torch's peak of allocated bytes since the
process began. **Predicted** peaks are this package's model of the same flags on the same number of
GPUs, without a device, and what torch's blocks add ([how](decisions/blocks.md)); nothing in it is
fitted to a row. GB are 10^9 bytes. Errors in the tables of statistics are absolute, but for the
last two columns.

Sources: golden values of Megatron-LM's functional tests (NVIDIA/Megatron-LM, file and commit in
each row of `megatron_golden_memory.csv`; values of the last rank, so of the last pipeline stage),
all other golden values with memory in Megatron-LM cf3b8ee60, which were added when the model was
done and can only judge it (`megatron_golden_memory_added.csv`),
and the runs on eight B200 that MooreThreads/SimuMax publishes, with SimuMax's own predictions
(`b200_measured.csv`; the largest peak of each stage's ranks). The tests' variables, and what their
containers have of torch and flash-attn, are read from their repository
(`megatron_test_containers.csv`, `megatron_recordings.csv`, `megatron_moe_recordings.csv`,
`benchmarks/measured/megatron_tests.py`). Tiers: A is above 4 GB, B above 0.8, C the rest and runs
on A100, as the table of golden values has them. No figures of the estimator of ISEEKYAN/mbridge for
these runs were found.
"""
OPEN = """**Open**, by what is missing in bytes; none of it is fitted:

- Routing: predictions are of even routing, and no MoE row of Megatron's tests forces it to be even
  (`--moe-router-force-load-balancing`). The families go by what evens it: Sinkhorn's assignment
  nearly does, whatever was learned; an auxiliary loss or an expert's bias has to be learned; with
  Megatron's default coefficient of 0 nothing evens it. In a run's first step the router has learned
  nothing; "MoE, first step" compares that peak, before Adam's moments. "MoE, second step logged"
  compares the first peak with them: what grows later, with as much held between steps, is routing
  and blocks. So do the jobs with fp8 experts (by 1.7 GB) and the proxies of DeepSeek-V3 (by 1.0 GB;
  restarted from a checkpoint, their peaks begin lower again).
  How uneven a router is that has learned nothing was simulated once on a CPU (12 layers of hidden
  size 512 by Megatron's initialisation, text as tokens): of eight experts, two for each token, one
  gets 0.8 to 1.3 times its share over all layers, 0.2 to 2.2 times in one layer; by Sinkhorn's
  assignment, two of four experts get 0.98 to 1.02 times over six layers. Muon's tests on two nodes
  of GB200 (EP 8, one expert a rank, not evened) need 0.2 GB less than the same tests on H100.
- Two runs that went on from a checkpoint (Sinkhorn, "reshard_2x1x4") have peaks 0.05 and 0.1 GB
  above those of the same job from the start, and none of 50 later steps has as much: loading, or
  what it leaves for the first step. Their checkpoints keep the optimizer by buckets, those of jobs
  whose peaks are alike do not (`--dist-ckpt-optim-fully-reshardable`); not followed further.
- Mixtral from a checkpoint, in the first step as in later ones: 0.8 to 1.0 GB on H100, as 7 to 9%
  more tokens than even on the last rank's expert would need (computed; whether they were there is
  in no row), and 2.1 GB on A100 in the container of long support, whose Transformer Engine 1.2 is
  older than its grouped products; no cause was found.
- One recording of grouped products on A100, of 2025-05-16, has 82 MB less than another of the same
  model, of 2025-05-29.
- First steps with fused cross entropy: up to 128 MB more, in some runs of equal flags. torch's
  inductor times what it compiled, and makes a tensor of the L2 cache's size for it
  (torch/_inductor/runtime/benchmarking.py `L2_cache_size`; 126.5 MiB on B200): the extra bytes of
  GB200 and H100 differ as these sizes do. It is in no later peak.
- Blocks: runs of equal flags differ by up to 13 MB, by which holes tensors fell into
  ([what is followed](decisions/blocks.md)). Under context parallelism one run's peak may grow for
  tens of steps, with as much held between them: on H100 from 1,224.4 MB at its second step to
  1,233.8 from its 42nd on. "Context parallel, first step" is before that.
- Nemotron 3.5 Lightning between steps: 347 MB more. 292 MB of it would be the fp32 main gradients
  of shards, which `--grad-reduce-in-bf16` makes in a step and the next forward no longer has (read
  in distrib_optimizer.py, not run).
- Fine-grained offload beside EP overlap: 15 MB missing on H100 in the second step, the first after
  Megatron's warm-up, 62 MB on GB200; the rest of 119 and 84 MB comes step by step until the 26th,
  as routing is learned. The step's time is not predicted.
- Nemotron 3.5 Lightning on 8 GB200: its second step is predicted a little too high; by its 17th it
  takes 17.4 GB more, as routing is learned, with as much held between steps.
- CUDA graphs: torch reports what their pool has only while they are captured. The one run whose
  capture is its peak (attention with scores) says that the pool is right; what the graphs of
  small layers keep between steps beside it is not predicted, and replays are compared without them.
- Fused cross entropy on A100 in containers of 2025: the first step took 0.5 and 0.9 GB more, as one
  and two copies of the logits would, and no later step did: not judged.
- T5 with scores: 100 to 135 MB of the release tests' 7 GB.
"""
NOT_JUDGED = """Not in the statistics above: another run of the same flags on the same GPUs measured
something else, the run is not of these flags, or a file that is not public says how it is
quantised (`benchmarks/measured/doubts.py`).
"""
RATIO = ("job", "setting", "to", "published", "predicted", "error", "source")
RATIOS = """### Steps with a setting to steps without

What a choice costs is a ratio of two steps. Published ones are of measured steps (of throughput
at the same model, where steps are not given). Predicted: both steps with the optimizer.

"""
NOT_COVERED = """A reason is the reader's, the package's or Megatron's own. More rows of the same
columns can be read with `python -m benchmarks.measured --rows FILE.csv -o FOLDER`.
"""
