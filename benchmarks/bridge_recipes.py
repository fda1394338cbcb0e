"""Do the settings of Megatron Bridge's performance recipes fit in this model? Writes a page.

python -m benchmarks.bridge_recipes [--only NAME] [--output benchmarks/results/bridge_recipes.md]
    [--rows benchmarks/results/bridge_recipes.md]

Needs a Bridge with perf_recipes and the Megatron-LM it pins: `make bridge-recipes`.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

from rich.progress import track  # noqa: E402

from benchmarks.measured.flags import FieldError  # noqa: E402
from benchmarks.published import runs  # noqa: E402
from megatron_autorecompute.cli.estimate import RESERVE_SHARE, default_budget_bytes  # noqa: E402
from megatron_autorecompute.errors import AutorecomputeError  # noqa: E402
from megatron_autorecompute.meta.devices import devices  # noqa: E402
from megatron_autorecompute.meta.job import Job  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402
from scripts import bridge_jobs, checkouts, nvidia_recipes  # noqa: E402

FITS = ("yes", "on the device", "no")


def line(name: str) -> list[str] | str:
    """One line of the table, or why there is none."""
    bridge_jobs.prepare()
    try:
        gpu, job = bridge_jobs.gpu_of(name), bridge_jobs.job_of(name)
        budget = default_budget_bytes(gpu, None, job)
        model = nvidia_recipes.problem_of(job, gpu)
        cost = nvidia_recipes.evaluated(model, bridge_jobs.setting(job))
    except AutorecomputeError as error:
        return bridge_jobs.reason(str(error), name)
    except Exception as error:  # a line says so, and no other is lost
        return f"an error of this package: {type(error).__name__}: {error}"[:200]
    peak = nvidia_recipes.peak_bytes(cost)
    fits = FITS[(peak > budget) + (peak > budget + RESERVE_SHARE * gpu.memory_bytes)]
    return [
        name.removesuffix("_config"),
        bridge_jobs.said_setting(job),
        f"{budget / GIB:.1f}",
        f"{peak / GIB:.1f}",
        fits,
        published(name, job),
        *nvidia_recipes.parts_of(model, cost),
        "" if fits == FITS[0] else nvidia_recipes.why(model, cost, budget),
    ]


def published(name: str, job: Job) -> str:
    """The newest release in which NVIDIA published a run of a recipe at these sizes, or nothing."""
    known = runs.of_recipe(name, runs.read_runs(runs.PUBLISHED))
    return next((run.release for run in known if run.of_sizes(runs.sizes(job))), "")


def documented() -> list[str]:
    """A line for each recipe whose docstring says other sizes than its body: what these need."""
    bridge_jobs.prepare()
    lines, gpu = [], devices()["b200-180gb"]
    for precision in ("bf16", "fp8cs", "fp8mx"):
        job = bridge_jobs.job_of(f"llama31_405b_pretrain_128gpu_b200_{precision}_config")
        job = replace(job, config={**job.config, **DOCUMENTED})
        model = nvidia_recipes.problem_of(job, gpu)
        peak = nvidia_recipes.peak_bytes(nvidia_recipes.evaluated(model, bridge_jobs.setting(job)))
        budget = default_budget_bytes(gpu, None, job)
        lines.append(f"  - {precision}: {peak / GIB:.1f} GiB, of a budget of {budget / GIB:.1f}")
    return lines


def page(found: dict[str, list[str] | str], read_from: str) -> str:
    """The page: what is said not to fit."""
    lines = [cells for cells in found.values() if isinstance(cells, list)]
    fitting, near, tight = ([cells for cells in lines if cells[4] == each] for each in FITS)
    ran = [cells for cells in lines if cells[5]]
    table = nvidia_recipes.table
    return "\n".join(
        [
            INTRODUCTION,
            *([f"{read_from}\n"] if read_from else []),
            f"{len(lines)} of {len(found)} recipes covered. The recipe's own setting fits the "
            f"budget in {len(fitting)} of them, and the device in {len(near)} more. NVIDIA "
            f"published runs of {len(ran)}: {sum(c in fitting for c in ran)} fit the budget, "
            f"{sum(c in near for c in ran)} the device, {sum(c in tight for c in ran)} do not.\n",
            "## Said not to fit\n",
            CHECKED,
            *documented(),
            CHECKED_TOO,
            table(HEADER, tight),
        ]
    )


def rows(found: dict[str, list[str] | str]) -> str:
    """A line for every recipe, and why some have none."""
    why_not: dict[str, list[str]] = collections.defaultdict(list)
    for name, cells in found.items():
        if isinstance(cells, str):
            why_not[cells].append(name.removesuffix("_config"))
    refused = [[text, str(len(each)), ", ".join(each)] for text, each in sorted(why_not.items())]
    lines = [cells for cells in found.values() if isinstance(cells, list)]
    table = nvidia_recipes.table
    head, reasons = "## Every recipe\n", ("reason", "recipes", "which")
    return "\n".join([head, table(HEADER, lines), "## Not covered\n", table(reasons, refused)])


HEADER = (
    *("recipe", "its setting", "budget GiB", "peak GiB", "fits", "published"),
    *nvidia_recipes.PARTS,
    "why not",
)
INTRODUCTION = """# Do the settings of Bridge's performance recipes fit?

Written by `make bridge-recipes`. **Nothing here is measured.**
[nvidia_recipes.md](nvidia_recipes.md) compares 40 of these settings with plans.

The recipes are the functions of `megatron.bridge.perf_recipes` (Bridge and Megatron-LM of August
2026), read as `estimate --recipe perf_recipes.NAME` reads them. They are NVIDIA's own benchmarks.
If a setting is said not to fit, the model may be wrong, and "why not" says by how much the setting
exceeds the budget, at which moment, and which part is the largest.

The budget is the device's memory less 5% for fragmentation and less what is assumed outside torch.
A setting fits "the device" if its peak needs part of these 5%. "Published" is the newest release
in which Bridge's tables (docs/performance-summary.md and its archive of August 2026) have a run
of that model, device, precision, number of GPUs, micro-batch and parallel sizes. Such a run did
fit, with the software of its time.
"""
DOCUMENTED = {
    "pipeline_model_parallel_size": 8,
    "context_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 8,
}
"""Sizes in the docstrings of llama31_405b on 128 B200."""
CHECKED = """What was looked at:

- **llama31_405b on 128 GPUs.** The docstrings of three functions for B200 say "TP=4 PP=8 CP=2",
  and NVIDIA published fp8cs and fp8mx with these sizes on 128 B200. The functions themselves set
  pp 16 and cp 1, like those for 256 GPUs, where twice as many ranks divide the optimizer's state.
  Stage 0 then has 143 chunks of one layer in flight. By hand, a layer keeps 64 + 64 + 72 + 64 + 64
  + 64 + 416 + 208 + 1 = 1,017 MiB in bf16 at tp 4: its input, the norm's output, q k v,
  attention's output, the residual, the second norm's output, both halves of fc1, fc2's input, and
  statistics. With the sizes of the docstrings:
"""
CHECKED_TOO = """- **llama31_405b in bf16 on 256 GPUs** has the same activations. Bridge's tables
  have 256 GB200 in fp8cs, fp8mx and nvfp4; its pull request 3759 gave nvfp4 there expandable
  segments "due to CUDA OOM".
- **llama31_405b in fp8mx on 128 B300 or GB300** is the setting of 256 GPUs, which NVIDIA published
  on GB300, with the optimizer's state divided by half as many ranks.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    parser.add_argument("--output", type=Path, default=RESULTS / "bridge_recipes.md")
    args = parser.parse_args()
    try:
        runs.all_read(runs.PUBLISHED)
    except FieldError as error:
        parser.error(str(error))
    names = [name for name in bridge_jobs.recipes() if args.only in name]
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, maxtasksperchild=12) as workers:
        found = list(track(workers.imap(line, names), description="recipes", total=len(names)))
    by_name = dict(zip(names, found, strict=True))
    args.output.write_text(
        page(by_name, checkouts.read_from()) + "\n" + rows(by_name), encoding="utf-8"
    )
    print(f"Written to {args.output}.")


if __name__ == "__main__":
    main()
