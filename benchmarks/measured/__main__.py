"""Hold predictions against every public measurement, without a device; write a page.

    python -m benchmarks.measured [--rows FILE.csv ...] [--only NAME] [-o DIR]

Needs megatron-core 0.19 on the path: `make measured`. Without -o it writes
benchmarks/results/measured.json and .md, docs/measured-runs.md and docs/pictures/measured.svg.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.progress import track

from benchmarks.measured import page, picture, ratios
from benchmarks.measured.flags import FieldError
from benchmarks.measured.machines import HOSTS
from benchmarks.measured.prediction import Case, Prediction, predicted
from benchmarks.measured.results import results
from benchmarks.measured.runs import Run, Unread
from benchmarks.measured.tables import read

ROOT = Path(__file__).parents[2]
DATA = ROOT / "benchmarks" / "data"
TABLES = ("b200_measured", "megatron_golden_memory", "megatron_golden_memory_added")
ROWS = tuple(DATA / f"{name}.csv" for name in TABLES)


def case(run: Run) -> Case:
    several = len(run.worlds) > 1
    between = run.between_steps_bytes if several else None
    sizes = run.encoder_decoder
    stages = tuple(sorted({one.stage for one in run.measured}))
    other = run.flags_without_quantising
    return Case(
        run.flags,
        run.worlds,
        run.gpu,
        between,
        sizes,
        run.environment,
        other,
        stages,
        run.scatters,
        run.evaluates,
        HOSTS[run.machine],
    )


def predictions(runs: list[Run], processes: int) -> dict[Case, Prediction]:
    """Of every case once, in processes of their own."""
    cases = list(dict.fromkeys(case(run) for run in runs if not run.uncovered))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as workers:
        found = track(workers.map(predicted, cases), description="jobs", total=len(cases))
        return dict(zip(cases, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.measured", description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", default=ROWS, help="CSVs of known columns")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="folder for all that is written")
    args = parser.parse_args()
    try:
        read_rows = [row for path in args.rows for row in read(path) if args.only in row.name]
    except (FieldError, OSError) as error:
        parser.error(str(error))
    if not read_rows:
        parser.error(f"no row in {', '.join(map(str, args.rows))} with {args.only!r} in its name")
    runs = [row for row in read_rows if isinstance(row, Run)]
    unread = [row for row in read_rows if isinstance(row, Unread)]
    found = predictions(runs, args.processes)
    data = results([(run, found.get(case(run))) for run in runs], unread)
    data["ratios"] = ratios.predicted() if not args.only else []
    json_path, page_path, picture_path = _paths(args.output)
    json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    picture.write(data, picture_path)
    page_path.write_text(page.text(data), encoding="utf-8")
    json_path.with_suffix(".md").write_text(page.rows(data), encoding="utf-8")
    print(page.summary(data))
    print(f"Written to {page_path}, {picture_path} and {json_path}.")


def _paths(folder: Path | None) -> tuple[Path, Path, Path]:
    if folder is None:
        docs = ROOT / "docs"
        results_path = ROOT / "benchmarks" / "results" / "measured.json"
        return results_path, docs / "measured-runs.md", docs / page.PICTURE
    (folder / page.PICTURE).parent.mkdir(parents=True, exist_ok=True)
    return folder / "measured.json", folder / "measured-runs.md", folder / page.PICTURE


if __name__ == "__main__":
    main()
