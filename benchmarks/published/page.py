"""docs/published-steps.md and every row behind it, from the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.measured.spread import Spread
from benchmarks.published.results import CHANGED, CHANGED_ROLE, FITTED_ROLE, JUDGES, Data
from scripts.tables import markdown

ALL = "all"


def text(data: Data) -> str:
    """The page: statistics."""
    read_from = data.get("read_from")
    parts = [INTRODUCTION, *([f"{read_from}\n"] if read_from else [])]
    parts += [_fitting(data), counted(data)]
    parts += [markdown(STATISTICS, _of_all_gpus(data)), OPEN]
    return "\n".join(parts)


def rows(data: Data) -> str:
    """The tables that have a line for each recipe."""
    parts = [ROWS, statistics(data), markdown(HEADER, map(_line, data["points"]))]
    parts += [KNOWN, markdown(("recipe", "since its run"), _changed(data["points"]))]
    parts += [NOT_COVERED, _uncovered(data["uncovered"])]
    if data["unread"]:
        lines = ([row["row"], row["reason"]] for row in data["unread"])
        parts += ["## Rows that cannot be read\n", markdown(("row", "reason"), lines)]
    return "\n".join(parts)


def counted(data: Data) -> str:
    """How much of what was published is here."""
    covered, uncovered = data["points"], data["uncovered"]
    of_covered = sum(len(point["published"]) for point in covered)
    return (
        f"{len(covered)} of {len(covered) + len(uncovered)} recipes with a published run are "
        f"covered. {of_covered} of {data['runs']} published runs have a covered recipe's sizes. "
        "The others belong to other recipes, or to sizes that a recipe had earlier.\n"
    )


STATISTICS = ("role", "GPU", "family", "rows", "median", "mean", "worst", "mean, signed")


def statistics(data: Data) -> str:
    """A line for each GPU and family, each GPU, each family, and all, by role."""
    return markdown(STATISTICS, _statistics(data["points"]))


def _statistics(points: Sequence[Data]) -> Iterator[tuple[str, ...]]:
    for key, rows in groups(points).items():
        own = Spread.of(row["error"] for row in rows)
        sizes = (f"{own.median:.1%}", f"{own.mean:.1%}", f"{own.worst:+.1%}")
        yield (*key, str(own.rows), *sizes, f"{own.signed_mean:+.1%}")


def _of_all_gpus(data: Data) -> Iterator[tuple[str, ...]]:
    return (line for line in _statistics(data["points"]) if line[1] == ALL)


def groups(points: Sequence[Data]) -> dict[tuple[str, str, str], list[Data]]:
    """Points by role, GPU and family: a GPU's families and all of them, then all GPUs."""
    found: dict[tuple[str, str, str], list[Data]] = {}
    for one in points:
        for chip in (chip_of(one), ALL):
            for family in (one["family"], ALL):
                found.setdefault((one["role"], chip, family), []).append(one)
    ordered = sorted(found, key=lambda key: (key[0], key[1] == ALL, key[1], key[2] == ALL, key[2]))
    return {key: found[key] for key in ordered}


def chip_of(point: Data) -> str:
    """The GPU without its memory."""
    return str(point["gpu"].partition("-")[0])


HEADER = (
    *("recipe", "family", "role", "recompute", "runs with", "release", "published s"),
    *("predicted s", "error", "older releases, s"),
)


def _line(point: Data) -> list[str]:
    newest, *older = point["published"]
    return [
        point["recipe"].removesuffix("_config"),
        point["family"],
        point["role"],
        point["setting"],
        point["runs_with"],
        newest["release"],
        f"{newest['step_s']:.2f}",
        f"{point['predicted_s']:.2f}",
        f"{point['error']:+.1%}",
        _range(older),
    ]


def _range(older: Sequence[Data]) -> str:
    """Shortest and longest step of the older releases, and which these are."""
    if not older:
        return ""
    steps = [run["step_s"] for run in older]
    releases = older[-1]["release"]
    if len(older) > 1:
        releases += f" to {older[0]['release']}"
    span = f"{min(steps):.2f}" + f" to {max(steps):.2f}" * (len(older) > 1)
    return f"{span} ({releases})"


def _changed(points: Sequence[Data]) -> list[list[str]]:
    names = [point["recipe"] for point in points if point["role"] == CHANGED_ROLE]
    return [[name.removesuffix("_config"), CHANGED[name]] for name in names]


def _uncovered(rows: Sequence[Data]) -> str:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row["reason"], []).append(row["recipe"].removesuffix("_config"))
    lines = ([reason, str(len(own)), ", ".join(own)] for reason, own in by_reason.items())
    return markdown(("reason", "recipes", "which"), sorted(lines))


def _fitting(data: Data) -> str:
    fitted = sum(point["role"] == FITTED_ROLE for point in data["points"])
    if not fitted:
        return NOTHING_FITTED
    return SOME_FITTED.format(fitted=fitted, all=len(data["points"]))


INTRODUCTION = """# Predictions against NVIDIA's published steps

Written by `make published-steps`. [A file of its own](../benchmarks/results/published_steps.md)
has every row, and the statistics of each GPU.
[bridge_recipes.md](../benchmarks/results/bridge_recipes.md) has the bytes of the same recipes, and
[measured-runs.md](measured-runs.md#times) other measured steps.

**Recipes** are the functions of `megatron.bridge.perf_recipes` (Bridge and Megatron-LM of August
2026), read as `estimate --recipe perf_recipes.NAME` reads them.

**Published** steps come from docs/performance-summary.md of Bridge and its archive of August 2026:
releases 26.02 to 26.08 (`benchmarks/data/bridge_published.csv`). A step is its samples times the
sequence length, divided by NVIDIA's tokens per second over all GPUs. A run belongs to a recipe if
model, task, GPUs, precision, batch sizes, sequence length, parallel sizes and FSDP are the same.
The newest such release is judged. The tables do not say which recompute, CUDA graphs, dispatcher
or overlap a run had, so these are taken from the recipe. NVIDIA's MoE runs route evenly by force,
as predictions do. Three newer steps come from Bridge's verification cards
(`examples/model_verification_cards/`, `benchmarks/data/bridge_cards.csv`): a card names its recipe
and has the mean of a run's last ten steps. Its release is the day of the run. Qwen3-8B's recipe is
of `megatron.bridge.recipes`.

**Predicted** steps are modelled without a device ([how](decisions/time-model.md)) under the
recipe's own recompute setting. They include the optimizer and the data-parallel collectives, and
leave out loading data, logging and checkpoints. What a recipe offloads stays on the device here.

An error is predicted divided by published, minus 1. Median and mean are of absolute errors.
"""
NOTHING_FITTED = f"""No figure of `meta/devices.json` was fitted on a row of this page, so no role
is "{FITTED_ROLE}". Rows whose role is "{CHANGED_ROLE}" do not judge.
"""
SOME_FITTED = f"""Figures of `meta/devices.json` were fitted on {{fitted}} of these {{all}} rows,
whose role is "{FITTED_ROLE}". Rows whose role is "{JUDGES}" judge the model. Rows whose role is
"{CHANGED_ROLE}" do not judge: the recipe of August 2026 has another setting than its newest
published run.
"""
ROWS = """# Every row behind docs/published-steps.md

Written by `make published-steps`. [The page](../../docs/published-steps.md) says what the columns
mean. "Runs with" is what the recipe of August 2026 says of CUDA graphs, of the dispatcher and of
overlap. A family is that of the model, or LoRA where only adapters are trained.
"""
KNOWN = """## What is known of rows

- Release 26.02 has Bridge 0.3.0, release 26.04 has 0.4.0, and release 26.06 has 0.5.0
  (docs/releases/software-versions.md). `scripts/performance/configs/` of these tags has their
  settings.
- Some recipes in fp8mx changed with 0.5.0: Qwen3, DeepSeek-V3 and gpt-oss on GB200 and GB300, and
  Qwen3-30B on B300. Their steps up to 26.04.01 are of another setting.
- A known issue makes gpt-oss slower in 26.06.01 (NVIDIA/cudnn-frontend 256).
"""
OPEN = """**What is open**: `fp8_dot_product_attention` is not read, so attention is timed in bf16.
CUDA graphs of layers beside EP overlap are not recognised, so the host starts their kernels here.
Two terms of Qwen3-8B's card and of gpt-oss's are undecided:

- **Attention on H100** is a guess: 445 TFLOP/s forward and 396 backward. cuDNN alone reaches 591
  and 474 on H200, and on GB200 1408 and 1148 where 1025 and 862 are taken (heads of 128, 4,096
  tokens; NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training). No source says how much of
  that is left in a step. H200's would make the step of Qwen3-8B 2% shorter, and GB200's the median
  of this page larger (6.6%).
- **Products of gpt-oss** have 2,880 columns or rows, which tiles of 256 do not divide. They have
  the share of large products. No source has kernels of these sizes.
"""
NOT_COVERED = """## Not covered

These recipes have a published run of their model, task, number of GPUs, GPU and precision. A
reason is the reader's own, or the sizes in which the nearest run differs.
"""
