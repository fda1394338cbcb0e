"""Do the settings of Megatron Bridge's performance recipes fit in this model? Writes a page.

python scripts/bridge_recipes.py [--only NAME] [--output docs/bridge-recipes.md]

Needs a Bridge with perf_recipes and the Megatron-LM it pins: `make bridge-recipes`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import logging
import multiprocessing
import os
import pkgutil
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rich.progress import track  # noqa: E402

from megatron_autorecompute.cli.estimate import default_budget_bytes  # noqa: E402
from megatron_autorecompute.errors import AutorecomputeError  # noqa: E402
from megatron_autorecompute.meta.devices import devices  # noqa: E402
from megatron_autorecompute.meta.job import Job  # noqa: E402
from megatron_autorecompute.meta.sensitivity import planner  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402
from scripts import nvidia_recipes, public_models  # noqa: E402

NAMED = re.compile(r"_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_")
PACKAGE = "megatron.bridge.perf_recipes"


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


def line(name: str) -> list[str] | str:
    """One line of the table, or why there is none."""
    prepare()
    from megatron_autorecompute.meta.recipe import job_from_recipe

    named = NAMED.search(name)
    assert named is not None
    gpu = {each.partition("-")[0]: found for each, found in devices().items()}.get(named["gpu"])
    if gpu is None:
        return f"no device {named['gpu']} is known"
    try:
        job = job_from_recipe(f"perf_recipes.{name}", int(named["gpus"]), gpu=gpu)
        budget = default_budget_bytes(gpu, None, job)
        model = planner(job, gpu)
        cost = nvidia_recipes.evaluated(model, setting(job))
    except AutorecomputeError as error:
        return reason(str(error), name)
    peak = nvidia_recipes.peak_bytes(cost)
    fits = peak <= budget
    return [
        name.removesuffix("_config"),
        setting(job).removeprefix("megatron:") + (", offload left out" if offloads(job) else ""),
        f"{budget / GIB:.1f}",
        f"{peak / GIB:.1f}",
        "yes" if fits else "no",
        *nvidia_recipes.parts_of(model, cost),
        "" if fits else nvidia_recipes.why(model, cost, budget),
    ]


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
    tight = [cells for cells in lines if cells[4] == "no"]
    refused = [[text, str(len(each)), ", ".join(each)] for text, each in sorted(why_not.items())]
    table = nvidia_recipes.table
    return "\n".join(
        [
            INTRODUCTION,
            f"{len(lines)} of {len(names)} recipes covered. The recipe's own setting fits in "
            f"{len(lines) - len(tight)} of them.\n",
            "## Said not to fit\n",
            table(HEADER, tight),
            "## All\n",
            table(HEADER, lines),
            "## Not covered\n",
            table(("reason", "recipes", "which"), refused),
        ]
    )


HEADER = (
    *("recipe", "its setting", "budget GiB", "peak GiB", "fits"),
    *nvidia_recipes.PARTS,
    "why not",
)
INTRODUCTION = """# Do the settings of Bridge's performance recipes fit?

Written by `make bridge-recipes` from the functions of `megatron.bridge.perf_recipes` (Bridge and
Megatron-LM of August 2026), read as `estimate --recipe perf_recipes.NAME` reads them, with the
number of GPUs that the name says. **Nothing here is measured.** These recipes are NVIDIA's own
benchmarks, so a setting that is said not to fit is a question to this model first: "why not" says
by how much, when, and which part is the largest. The budget is the device's memory less 5% and
what is assumed outside torch. [nvidia-recipes.md](nvidia-recipes.md) holds 40 of these settings
against plans.
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
