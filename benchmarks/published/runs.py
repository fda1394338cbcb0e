"""NVIDIA's published runs of Megatron Bridge, and which of them are of a recipe.

PUBLISHED: docs/performance-summary.md and docs/performance-summary-archive.md of Bridge, August
2026, whose columns it has. CARDS: examples/model_verification_cards/MODEL/card.yaml of the same
Bridge, the mean of a run's last ten steps; a card names its recipe and the day it ran, which stands
for the release.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measured import cells
from benchmarks.measured.flags import FieldError, whole
from benchmarks.measured.runs import Unread

if TYPE_CHECKING:
    from megatron_autorecompute.meta.job import Job

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks" / "data" / "bridge_published.csv"
CARDS = ROOT / "benchmarks" / "data" / "bridge_cards.csv"
TASKS = {"pretrain": "pretrain", "sft": "sft", "lora": "peft"}
"""Of the tables, as names of recipes have them."""
FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Columns, and the fields of a config that they are."""
BATCH = "gbs"
SIZES = (*FIELDS, "mbs", "seq", "fsdp", BATCH)
"""Columns that say which job of a recipe's name a run is of."""
WORDS = ("model", "gpu", "precision")
COLUMNS = {"release", "task", "gpus", "tokens_per_s_gpu", *WORDS, *SIZES}


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row."""

    release: str
    """Of NVIDIA's container: year and month, and a number; of a card: year, month and day."""
    recipe: str
    """How the names of its recipes begin; several have the sizes of other jobs."""
    sizes: Mapping[str, int]
    """By SIZES."""
    step_s: float
    """Seconds, by the tokens of a step and the published tokens per second and GPU."""

    def of_sizes(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is of these sizes, whatever the global batch: bytes do not ask for it."""
        return set(self.others(sizes)) <= {BATCH}

    def others(self, sizes: Mapping[str, int]) -> list[str]:
        """The columns in which it has not these sizes."""
        return [column for column in SIZES if self.sizes[column] != sizes[column]]


def sizes(job: Job) -> dict[str, int]:
    """A job's sizes, by SIZES. FSDP, which no job without a device has, is 0."""
    found = {column: int(job.config.get(field) or 1) for column, field in FIELDS.items()}
    own = {"mbs": job.micro_batch_size, "seq": job.seq_length, BATCH: job.global_batch_size}
    return {**found, **own, "fsdp": 0}


def of_recipe(name: str, runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Runs of a recipe's name, whatever their sizes, newest first."""
    own = [run for run in runs if name.startswith(run.recipe)]
    return sorted(own, key=lambda run: order(run.release), reverse=True)


def of_recipes(names: Iterable[str], runs: Sequence[PublishedRun]) -> tuple[PublishedRun, ...]:
    """Runs of any of these recipes' names."""
    own = {run.recipe for name in names for run in of_recipe(name, runs)}
    return tuple(run for run in runs if run.recipe in own)


def order(release: str) -> tuple[int, ...]:
    """By which releases are older and newer."""
    return tuple(int(part) for part in release.split("."))


def read(path: Path) -> Iterator[PublishedRun | Unread]:
    """Every row of a CSV of COLUMNS; raises FieldError for another file."""
    with cells.opened(path) as table:
        if lacking := sorted(COLUMNS - set(table.fieldnames or ())):
            raise FieldError(f"{path}: no table of published runs: it lacks {', '.join(lacking)}")
        for number, row in enumerate(table, start=2):
            try:
                cells.check(row)
                yield _run(row)
            except FieldError as error:
                yield Unread(f"line {number}", row.get("release") or "", str(error))


def _run(row: Mapping[str, Any]) -> PublishedRun:
    found = {column: whole(row, column, least=column != "fsdp") for column in SIZES}
    model, gpu, precision = (_word(row, column) for column in WORDS)
    gpus, tokens = whole(row, "gpus"), found[BATCH] * found["seq"]
    named = f"{model}_{_task(row)}_{gpus}gpu_{gpu}_{precision}_"
    return PublishedRun(_release(row), named, found, tokens / gpus / _tokens_per_s(row))


def _word(row: Mapping[str, str], column: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]+", row[column]):
        raise FieldError(f"{column}: a name as in recipes is needed, not {row[column]!r}")
    return row[column]


def _task(row: Mapping[str, str]) -> str:
    if row["task"] not in TASKS:
        raise FieldError(f"task: one of {', '.join(TASKS)} is needed, not {row['task']!r}")
    return TASKS[row["task"]]


def _release(row: Mapping[str, str]) -> str:
    if not re.fullmatch(r"\d+(\.\d+)+", row["release"]):
        raise FieldError(f"release: numbers as in 26.04.01 are needed, not {row['release']!r}")
    return row["release"]


def _tokens_per_s(row: Mapping[str, str]) -> float:
    text = row["tokens_per_s_gpu"]
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise FieldError(f"tokens_per_s_gpu: a number above 0 is needed, not {text!r}")
    return number


@functools.cache
def read_runs(path: Path) -> tuple[PublishedRun, ...]:
    """The rows that can be read."""
    return tuple(row for row in read(path) if isinstance(row, PublishedRun))


def with_cards() -> tuple[PublishedRun, ...]:
    """The rows of both tables that can be read."""
    return read_runs(PUBLISHED) + read_runs(CARDS)


def recipes_of_cards() -> set[str]:
    """The names of the recipes that ran."""
    return {f"{run.recipe}config" for run in read_runs(CARDS)}


def all_read(path: Path) -> tuple[PublishedRun, ...]:
    """All rows. Raises FieldError, which names every row that cannot be read."""
    if wrong := [f"{row.name}: {row.reason}" for row in read(path) if isinstance(row, Unread)]:
        raise FieldError(f"{path}: " + "; ".join(wrong))
    return read_runs(path)


def nearest(runs: Sequence[PublishedRun], sizes: Mapping[str, int]) -> PublishedRun:
    """Of at least one run, newest first, the one that differs from these sizes in the fewest
    columns."""
    return min(runs, key=lambda run: len(run.others(sizes)))


def unlike(run: PublishedRun, sizes: Mapping[str, int]) -> str:
    """Why a run is not of a recipe with these sizes."""
    others = run.others(sizes)
    theirs = ", ".join(f"{column} {run.sizes[column]}" for column in others)
    ours = ", ".join(f"{column} {sizes[column]}" for column in others)
    return f"other sizes: the nearest published run ({run.release}) has {theirs}, the recipe {ours}"
