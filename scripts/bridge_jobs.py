"""Jobs of Megatron Bridge's recipes, as `estimate --recipe` reads them.

Needs a Bridge with perf_recipes and the Megatron-LM it pins.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import re
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Device, devices
from megatron_autorecompute.meta.job import Job
from scripts import nvidia_recipes, public_models

PACKAGE = "megatron.bridge.perf_recipes"
NAMED = re.compile(r"_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_")


@functools.cache
def prepare() -> None:
    """Import Bridge without CUDA and Transformer Engine, and let it read models of this folder."""
    from testing import bridge_launch as launch

    logging.disable(logging.WARNING)
    launch.prepare()
    from megatron.bridge import AutoBridge

    def known(cls: Any, path: str, **_: Any) -> Any:
        return cls.from_hf_config(public_models.hub_config(str(path)))

    AutoBridge.from_hf_pretrained = classmethod(known)


@functools.cache
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


def gpu_of(name: str) -> Device:
    """The device that a recipe's name says. Raises OptionError if none of that name is known."""
    gpu = _named(name)["gpu"]
    for entry, found in devices().items():
        if entry.partition("-")[0] == gpu:
            return found
    raise OptionError(f"no device {gpu} is known")


def job_of(name: str) -> Job:
    """A performance recipe's job, or one of Bridge's other recipes; where it leaves the vocabulary
    to a tokenizer, with the public one."""
    from megatron_autorecompute.meta.recipe import job_from_recipe

    gpus = int(_named(name)["gpus"])
    named = f"perf_recipes.{name}" if name in recipes() else name
    read = functools.partial(job_from_recipe, named, gpus, gpu=gpu_of(name))
    try:
        return read()
    except OptionError as error:
        sizes = public_models.VOCABULARIES.items()
        known = [size for tokenizer, size in sizes if f"({tokenizer})" in str(error)]
        if not known:
            raise
    return read(vocab_size=known[0])


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


def said_setting(job: Job) -> str:
    """The setting for a table, which says when the recipe also offloads."""
    offloads = ", offload left out" if _offloads(job) else ""
    return setting(job).removeprefix("megatron:") + offloads


def _offloads(job: Job) -> bool:
    """Whether the recipe moves activations to host memory."""
    names = ("cpu_offloading", "fine_grained_activation_offloading")
    return any(job.config.get(name) for name in names)


def reason(text: str, name: str) -> str:
    """An error without the recipe's name, one line of it."""
    for prefix in (f"The recipe perf_recipes.{name}", f"perf_recipes.{name}"):
        text = text.replace(prefix, "it")
    return " ".join(text.split())[:200]


def _named(name: str) -> re.Match[str]:
    found = NAMED.search(name)
    assert found is not None, f"{name} is none of recipes()"
    return found
