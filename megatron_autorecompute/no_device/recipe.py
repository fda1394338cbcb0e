"""A job from one of Megatron Bridge's recipes."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Any

from megatron_autorecompute.errors import MachineError, OptionError
from megatron_autorecompute.no_device.flags import plain_config
from megatron_autorecompute.no_device.job import Job, job_from


def job_from_recipe(name: str) -> Job:
    """The job of a recipe function such as llama3_70b_pretrain_config.

    Raises MachineError where Bridge is not installed, OptionError for an unknown recipe.
    """
    try:
        recipes = importlib.import_module("megatron.bridge.recipes")
    except ImportError as error:
        raise MachineError(
            f"--recipe {name} asks for Megatron Bridge, which cannot be imported ({error}). "
            "Install megatron-bridge, or describe the job in YAML (examples/no_device)."
        ) from error
    config = _recipe(recipes, name)()
    model = config.model
    known = {field.name: getattr(model, field.name, None) for field in fields(model)}
    return job_from(
        {
            "name": name,
            "described_by": "recipe",
            "config": plain_config(known),
            "num_gpus": _gpus(model),
            "seq_length": model.seq_length,
            "micro_batch_size": config.train.micro_batch_size,
            "global_batch_size": config.train.global_batch_size,
            "vocab_size": model.vocab_size,
            "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        },
        f"The recipe {name}",
    )


def _gpus(model: Any) -> int:
    """The smallest world the recipe's parallel sizes fill: recipes do not name one."""
    dense = model.tensor_model_parallel_size * model.context_parallel_size
    experts = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or 1)
    return int(model.pipeline_model_parallel_size * max(dense, experts))


def _recipe(recipes: Any, name: str) -> Any:
    for module in pkgutil.walk_packages(recipes.__path__, recipes.__name__ + "."):
        found = getattr(importlib.import_module(module.name), name, None)
        if callable(found) and not is_dataclass(found):
            return found
    raise OptionError(f"Megatron Bridge has no recipe function {name!r} under {recipes.__name__}.")
