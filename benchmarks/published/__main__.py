"""Hold predicted steps of Bridge's performance recipes against NVIDIA's published ones.

    python -m benchmarks.published [--only NAME] [--processes N] [-o DIR]

Needs a Bridge with perf_recipes and the Megatron-LM it pins: `make published-steps`. Without -o it
writes benchmarks/results/published_steps.json and .md, and docs/published-steps.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from benchmarks.measured.flags import FieldError
from benchmarks.measured.runs import Unread
from benchmarks.published import page
from benchmarks.published.prediction import Data, predicted
from benchmarks.published.results import asked, results
from benchmarks.published.runs import (
    CARDS,
    PUBLISHED,
    ROOT,
    of_recipes,
    read,
    recipes_of_cards,
    with_cards,
)
from scripts import bridge_jobs
from scripts.checkouts import read_from


def predictions(names: Sequence[str], processes: int) -> list[Data]:
    """Of every recipe, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=12) as workers:
        found = workers.imap(predicted, names)
        return list(track(found, description="recipes", total=len(names)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__)
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="folder for all that is written")
    args = parser.parse_args()
    try:
        rows = (row for path in (PUBLISHED, CARDS) for row in read(path))
        unread = [row for row in rows if isinstance(row, Unread)]
        recipes = sorted({*bridge_jobs.recipes(), *recipes_of_cards()})
        names = asked(recipes, with_cards(), args.only)
        runs = of_recipes(names, with_cards()) if args.only else with_cards()
        data = results(predictions(names, args.processes), runs, unread)
        data["read_from"] = read_from()
    except (FieldError, OSError) as error:
        parser.error(str(error))
    json_path, page_path = _paths(args.output)
    json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page_path.write_text(page.text(data), encoding="utf-8")
    json_path.with_suffix(".md").write_text(page.rows(data), encoding="utf-8")
    print(page.counted(data) + page.statistics(data))
    print(f"Written to {page_path} and {json_path}.")


def _paths(folder: Path | None) -> tuple[Path, Path]:
    name = "published-steps.md"
    if folder is None:
        return ROOT / "benchmarks" / "results" / "published_steps.json", ROOT / "docs" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "published_steps.json", folder / name


if __name__ == "__main__":
    main()
