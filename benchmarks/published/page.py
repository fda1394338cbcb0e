"""docs/published-steps.md, from the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.measured.spread import Spread
from benchmarks.published.results import CHANGED, CHANGED_ROLE, FITTED_ROLE, JUDGES, Data
from benchmarks.tables import markdown

ALL = "all"


def text(data: Data) -> str:
    """The whole page."""
    parts = [INTRODUCTION, _fitting(data), counted(data)]
    parts += [statistics(data), ROWS, markdown(HEADER, map(_line, data["points"]))]
    parts += [KNOWN, markdown(("recipe", "since its run"), _changed(data["points"])), OPEN]
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
        f"{len(covered)} of {len(covered) + len(uncovered)} recipes with a published run of their "
        f"name are covered. {of_covered} of {data['runs']} published runs are of their sizes; the "
        "others are of recipes that are not covered, or of sizes that recipes had earlier.\n"
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

Written by `make published-steps` from the functions of `megatron.bridge.perf_recipes` (Bridge and
Megatron-LM of August 2026), read as `estimate --recipe perf_recipes.NAME` reads them, with the
number of GPUs that the name says. [bridge-recipes.md](bridge-recipes.md) has the bytes of the same
recipes, [measured-runs.md](measured-runs.md#times) other measured steps.

**Published** steps are seconds, by NVIDIA's tokens per second and GPU: global batch times sequence
length, by GPUs and by that. Source: docs/performance-summary.md and its archive in Bridge, of
August 2026, releases 26.02 to 26.08 (`benchmarks/data/bridge_published.csv`). A run is of a recipe
if model, task, number of GPUs, GPU, precision, global batch, micro-batch, sequence length, parallel
sizes and FSDP are the same. The newest such release is judged; older ones are listed, with the
software of their time. The tables do not say which recompute, CUDA graphs, dispatcher and overlap
a run had: those here are of the recipe of August 2026, older releases may have had others. In their
MoE runs tokens are spread evenly over experts by force, and none is dropped (their footnote), as
they are here.

**Predicted** steps are modelled without a device ([how](decisions/time-model.md)), the optimizer
and data-parallel collectives included, under the recipe's own recompute setting. What a recipe
offloads stays on the device here; its row says so. Loading data, logging and checkpoints are
not in the model.

An error is predicted by published, less 1. In the table of statistics errors are absolute, but for
the last two columns.
"""
NOTHING_FITTED = f"""No figure of `meta/devices.json` was fitted on a row of this page: no role is
"{FITTED_ROLE}". That file says which figures were fitted on other runs, and which are assumed to be
as on another device. Rows whose role is "{CHANGED_ROLE}" do not judge: see below.
"""
SOME_FITTED = f"""Figures of `meta/devices.json` were fitted on {{fitted}} of these {{all}} rows,
whose role is "{FITTED_ROLE}" (`FITTED` in `benchmarks/published/results.py`); those whose role is
"{JUDGES}" judge, those that are "{CHANGED_ROLE}" do not: see below.
"""
ROWS = """## All rows

"Runs with" is what the recipe of August 2026 says of CUDA graphs, of the dispatcher of tokens and
of overlap. A family is that of the model, or LoRA where only adapters are trained.
"""
KNOWN = f"""## What is known of rows

- Bridge's docs/releases/software-versions.md: release 26.02 has Bridge 0.3.0, 26.04 has 0.4.0,
  26.06 has 0.5.0. Their settings are in `scripts/performance/configs/` of these tags.
- In fp8mx on GB200 and GB300, Qwen3, DeepSeek-V3 and gpt-oss, and Qwen3-30B on B300, have a CUDA
  graph of the whole iteration, EP overlap and fused grouped products from 0.5.0 on, and attention
  in fp8 but for DeepSeek-V3 on GB200. Their steps of 26.04.01 and older are of another setting.
- gpt-oss in 26.06.01: slower by a known issue, NVIDIA/cudnn-frontend 256, says the archive.
- Kimi-K2 ran with Muon, says the archive; so does the recipe.
- "{CHANGED_ROLE}": the recipe of August 2026 has another setting than its newest published run.
"""
OPEN = """**Open**, by the recipes' sources:

- `fp8_dot_product_attention` is not read: attention is timed in bf16.
- Graphs of layers beside EP overlap are not told apart: the host starts their kernels here.
"""
NOT_COVERED = """## Not covered

Recipes with a published run of their model, task, number of GPUs, GPU and precision. A reason is
the reader's own, or in which sizes the nearest run differs.
"""
