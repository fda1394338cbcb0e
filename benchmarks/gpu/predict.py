"""Predict part 8's jobs from their flags, without a device, into the results that measured them.

    python -m benchmarks.gpu.predict benchmarks/results/gpu/1/results.json

Needs no GPU, and megatron-core 0.17 or newer, which reads the flags. Writes the pages anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import page
from benchmarks.gpu.results import Results
from benchmarks.measured.prediction import Case, predicted
from megatron_autorecompute.errors import AutorecomputeError

GPUS = {"NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA H200": "h200"}
"""Torch's name of a device, and ours."""


def main() -> None:
    """Predict every measured job of every file named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predict")
    parser.add_argument("results", nargs="+", type=Path, help="results.json of benchmarks.gpu.run")
    for path in parser.parse_args().results:
        results = Results.load(path)
        _predict(results)
        results.save()
        page.write(results, path.parent)


def _predict(results: Results) -> None:
    for section in results.sections.values():
        for name, job in list(section.items.items()):
            if section.part != 8 or not name.startswith("job/"):
                continue
            gpu = GPUS.get(results.machine["device"], results.machine["device"])
            found = predicted(Case(tuple(job["flags"].split()), (1,), gpu))
            [*stages] = found.stages
            item = {"uncovered": found.uncovered}
            if stages:
                parts = stages[0].parts
                item = {"peak_bytes": stages[0].peak_bytes, "static_bytes": parts["static"]}
            section.items[name.replace("job/", "predicted/")] = item
            print(name, item)


if __name__ == "__main__":
    try:
        main()
    except AutorecomputeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
