"""Do the settings of Megatron Bridge's performance recipes fit in this model? Writes a page.

python scripts/bridge_recipes.py [--only NAME] [--output docs/bridge-recipes.md]

Needs a Bridge with perf_recipes and the Megatron-LM it pins: `make bridge-recipes`.
"""

from __future__ import annotations

import argparse
import collections
import csv
import functools
import importlib
import logging
import multiprocessing
import os
import pkgutil
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.progress import track  # noqa: E402

from megatron_autorecompute.cli.estimate import RESERVE_SHARE, default_budget_bytes  # noqa: E402
from megatron_autorecompute.errors import AutorecomputeError, OptionError  # noqa: E402
from megatron_autorecompute.meta.devices import Device, devices  # noqa: E402
from megatron_autorecompute.meta.job import Job  # noqa: E402
from megatron_autorecompute.meta.sensitivity import planner  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402
from scripts import nvidia_recipes, public_models  # noqa: E402

NAMED = re.compile(r"_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_")
PACKAGE = "megatron.bridge.perf_recipes"
PUBLISHED = ROOT / "benchmarks" / "data" / "bridge_published.csv"
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Columns of PUBLISHED, and the fields of a config that they are."""
FITS = ("yes", "on the device", "no")


@functools.cache
def prepare() -> None:
    """Import Bridge without CUDA and Transformer Engine, and let it read models of this folder."""
    from tests.bridge import launch

    logging.disable(logging.WARNING)
    launch.prepare()
    from megatron.bridge import AutoBridge

    def known(cls: Any, path: str, **_: Any) -> Any:
        return cls.from_hf_config(public_models.hub_config(str(path)))

    AutoBridge.from_hf_pretrained = classmethod(known)


def recipes() -> list[str]:
    """Names of all performance recipes."""
    prepare()
    package = importlib.import_module(PACKAGE)
    modules = pkgutil.walk_packages(package.__path__, PACKAGE + ".")
    names = {
        name
        for module in modules
        for name in vars(importlib.import_module(module.name))
        if NAMED.search(name) and name.endswith("_config") and not name.startswith("_")
    }
    return sorted(names)


def setting(job: Job) -> str:
    """The recipe's own recompute setting in the policy grammar."""
    config = job.config
    row = {
        "recompute_granularity": config.get("recompute_granularity"),
        "recompute_method": config.get("recompute_method"),
        "recompute_num_layers": config.get("recompute_num_layers"),
        "recompute_modules": "+".join(config.get("recompute_modules") or ()),
    }
    return nvidia_recipes.setting(row)


def offloads(job: Job) -> bool:
    """Whether the recipe moves activations to host memory."""
    names = ("cpu_offloading", "fine_grained_activation_offloading")
    return any(job.config.get(name) for name in names)


def job_of(name: str, gpus: int, gpu: Device) -> Job:
    """The recipe's job; where it leaves the vocabulary to a tokenizer, with the public one."""
    from megatron_autorecompute.meta.recipe import job_from_recipe

    read = functools.partial(job_from_recipe, f"perf_recipes.{name}", gpus, gpu=gpu)
    try:
        return read()
    except OptionError as error:
        sizes = public_models.VOCABULARIES.items()
        known = [size for tokenizer, size in sizes if f"({tokenizer})" in str(error)]
        if not known:
            raise
    return read(vocab_size=known[0])


def line(name: str) -> list[str] | str:
    """One line of the table, or why there is none."""
    prepare()
    named = NAMED.search(name)
    assert named is not None
    gpu = {each.partition("-")[0]: found for each, found in devices().items()}.get(named["gpu"])
    if gpu is None:
        return f"no device {named['gpu']} is known"
    try:
        job = job_of(name, int(named["gpus"]), gpu)
        budget = default_budget_bytes(gpu, None, job)
        model = planner(job, gpu)
        cost = nvidia_recipes.evaluated(model, setting(job))
    except AutorecomputeError as error:
        return reason(str(error), name)
    peak = nvidia_recipes.peak_bytes(cost)
    fits = FITS[(peak > budget) + (peak > budget + RESERVE_SHARE * gpu.memory_bytes)]
    return [
        name.removesuffix("_config"),
        setting(job).removeprefix("megatron:") + (", offload left out" if offloads(job) else ""),
        f"{budget / GIB:.1f}",
        f"{peak / GIB:.1f}",
        fits,
        published(name, job),
        *nvidia_recipes.parts_of(model, cost),
        "" if fits == FITS[0] else nvidia_recipes.why(model, cost, budget),
    ]


@functools.cache
def published_runs() -> tuple[dict[str, str], ...]:
    """Rows of PUBLISHED, newest release first."""
    with open(PUBLISHED, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def published(name: str, job: Job) -> str:
    """The newest release in which NVIDIA published a run of a recipe at these sizes, or nothing."""
    config = job.config
    sizes = {column: str(config.get(field) or 1) for column, field in SIZES.items()}
    sizes |= {"mbs": str(job.micro_batch_size), "seq": str(job.seq_length)}
    for run in published_runs():
        named = f"{run['model']}_{run['task']}_{run['gpus']}gpu_{run['gpu']}_{run['precision']}_"
        if name.startswith(named) and all(run[column] == size for column, size in sizes.items()):
            return run["release"]
    return ""


def documented() -> list[str]:
    """A line for each recipe whose docstring says other sizes than its body: what these need."""
    prepare()
    lines, gpu = [], devices()["b200-180gb"]
    for precision in ("bf16", "fp8cs", "fp8mx"):
        job = job_of(f"llama31_405b_pretrain_128gpu_b200_{precision}_config", 128, gpu)
        job = replace(job, config={**job.config, **DOCUMENTED})
        model = planner(job, gpu)
        peak = nvidia_recipes.peak_bytes(nvidia_recipes.evaluated(model, setting(job)))
        budget = default_budget_bytes(gpu, None, job)
        lines.append(f"  - {precision}: {peak / GIB:.1f} GiB, of a budget of {budget / GIB:.1f}")
    return lines


def reason(text: str, name: str) -> str:
    """An error without the recipe's name, one line of it."""
    for prefix in (f"The recipe perf_recipes.{name}", f"perf_recipes.{name}"):
        text = text.replace(prefix, "it")
    return " ".join(text.split())[:200]


def page(names: list[str], found: list[list[str] | str]) -> str:
    """The whole page."""
    lines = [cells for cells in found if isinstance(cells, list)]
    why_not: dict[str, list[str]] = collections.defaultdict(list)
    for name, cells in zip(names, found, strict=True):
        if isinstance(cells, str):
            why_not[cells].append(name.removesuffix("_config"))
    fitting, near, tight = ([cells for cells in lines if cells[4] == each] for each in FITS)
    ran = [cells for cells in lines if cells[5]]
    refused = [[text, str(len(each)), ", ".join(each)] for text, each in sorted(why_not.items())]
    table = nvidia_recipes.table
    return "\n".join(
        [
            INTRODUCTION,
            f"{len(lines)} of {len(names)} recipes covered. The recipe's own setting fits the "
            f"budget in {len(fitting)} of them, and the device in {len(near)} more. NVIDIA "
            f"published runs of {len(ran)}: {sum(c in fitting for c in ran)} fit the budget, "
            f"{sum(c in near for c in ran)} the device, {sum(c in tight for c in ran)} do not.\n",
            "## Said not to fit\n",
            CHECKED,
            *documented(),
            CHECKED_TOO,
            table(HEADER, tight),
            "## Said to fit the device, not the budget\n",
            table(HEADER, near),
            "## All\n",
            table(HEADER, lines),
            "## Not covered\n",
            table(("reason", "recipes", "which"), refused),
        ]
    )


HEADER = (
    *("recipe", "its setting", "budget GiB", "peak GiB", "fits", "published"),
    *nvidia_recipes.PARTS,
    "why not",
)
INTRODUCTION = """# Do the settings of Bridge's performance recipes fit?

Written by `make bridge-recipes` from the functions of `megatron.bridge.perf_recipes` (Bridge and
Megatron-LM of August 2026), read as `estimate --recipe perf_recipes.NAME` reads them, with the
number of GPUs that the name says. **Nothing here is measured.** These recipes are NVIDIA's own
benchmarks, so a setting that is said not to fit is a question to this model first: "why not" says
by how much, when, and which part is the largest. The budget is the device's memory less 5% and
what is assumed outside torch; "on the device" is a peak that needs part of these 5%, which are for
fragmentation. "published" is the newest release in which Bridge's own tables of performance
(docs/performance-summary.md and its archive of August 2026, in
`benchmarks/data/bridge_published.csv`) have a run of that model, device, precision, number of GPUs,
micro-batch and parallel sizes: such a run did fit, with the software of its time.
[nvidia-recipes.md](nvidia-recipes.md) holds 40 of these settings against plans.
"""
DOCUMENTED = {
    "pipeline_model_parallel_size": 8,
    "context_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 8,
}
"""Sizes in the docstrings of llama31_405b on 128 B200."""
CHECKED = """What was looked at:

- **llama31_405b on 128 GPUs.** The docstrings of the functions for B200 in bf16, fp8cs and fp8mx
  say "TP=4 PP=8 CP=2", and NVIDIA published fp8cs and fp8mx on 128 B200 with these sizes and vp 8
  (releases 25.09 and 25.11). The functions set pp 16 and cp 1, as those for 256 GPUs do, where
  twice as many ranks divide the optimizer's state. Stage 0 then has 143 chunks of one layer in
  flight, and a layer keeps 1,017 MiB in bf16: its input, the norm's output, q k v, attention's
  output, the residual, the second norm's output, both halves of fc1 and fc2's input are 64 + 64 +
  72 + 64 + 64 + 64 + 416 + 208 MiB at tp 4, by hand, and 1 of statistics. With the sizes of the
  docstrings:
"""
CHECKED_TOO = """- **llama31_405b in bf16 on 256 GPUs** has the same activations. Bridge's
  tables have 256 GB200 in fp8cs, fp8mx and nvfp4; its pull request 3759 gave nvfp4 there expandable
  segments "due to CUDA OOM".
- **llama31_405b in fp8mx on 128 B300 or GB300** is the setting of 256 GPUs, which NVIDIA published
  on GB300, with the optimizer's state divided by half as many ranks.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "bridge-recipes.md")
    args = parser.parse_args()
    names = [name for name in recipes() if args.only in name]
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, maxtasksperchild=12) as workers:
        found = list(track(workers.imap(line, names), description="recipes", total=len(names)))
    args.output.write_text(page(names, found), encoding="utf-8")
    print(f"Written to {args.output}.")


if __name__ == "__main__":
    main()
