"""A job from one of Megatron Bridge's recipes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from megatron_autorecompute.errors import MachineError, OptionError
from megatron_autorecompute.meta.devices import Device, device
from megatron_autorecompute.meta.flags import engine, plain_config, settings_of
from megatron_autorecompute.meta.job import Job, job_from
from megatron_autorecompute.meta.job_config import IN_A_JOB, refuse_unmodelled
from megatron_autorecompute.patched import patched

PERF_RECIPES = "megatron.bridge.perf_recipes"
"""Recipes of NVIDIA's own measured runs, one for each world and precision; Bridge 0.6 on."""

NEWEST_TE = "2.14"
"""A version of Transformer Engine that has what recipes ask for. Bytes follow the job's own."""

TOWERS = ("vision_config", "vision_model_type", "audio_config", "thinker_config")
"""Fields of the providers whose model has a vision or audio tower before its decoder."""


def job_from_recipe(
    name: str,
    num_gpus: int | None = None,
    vocab_size: int | None = None,
    gpu: Device | None = None,
) -> Job:
    """The job of a recipe function such as llama3_70b_pretrain_config.

    Args:
        name: the function's.
        num_gpus: the world size; by default the smallest that the recipe's parallel sizes fill.
        vocab_size: where the recipe leaves it to the tokenizer, which only a job reads.
        gpu: what the job will run on, as recipes of MoE models ask for it; by default an H100.

    Raises MachineError if Bridge is not installed or cannot read the model's public config,
    OptionError for an unknown recipe, a vision-language model's, FSDP, an optimizer in host memory,
    adapters that are not modelled, or if nothing says the vocabulary.
    """
    try:
        recipes = importlib.import_module("megatron.bridge.recipes")
    except ImportError as error:
        raise MachineError(
            f"--recipe {name} asks for Megatron Bridge, which cannot be imported ({error}). "
            "Install megatron-bridge, or describe the job in YAML (megatron-autorecompute example)."
        ) from error
    here = functools.partial(_properties, gpu or device("h100-80gb"))
    try:
        with patched(torch.cuda, "get_device_properties", here), _fused_gradients():
            cfg = _recipe(recipes, name)()
    except (OSError, ValueError) as error:  # raised by transformers if it cannot reach the hub
        raise MachineError(
            f"The recipe {name} reads its model's public config, and that failed: {error}. Run it "
            "once where the hub can be reached, or describe the job in YAML "
            "(megatron-autorecompute example)."
        ) from error
    _refuse(name, cfg)
    num_gpus = num_gpus or _gpus(cfg.model)
    _set_overlaps(name, cfg, num_gpus)
    mixed, model = _mixed_precision(cfg), cfg.model
    data = {
        "name": name,
        "described_by": "recipe",
        "num_gpus": num_gpus,
        **settings_of(
            f"The recipe {name}: optimizer",
            cfg.optimizer,
            model,
            cfg.train,
            cfg.ddp,
            precision=mixed,
        ),
        **_model(model),
        # Bridge replaces the setting of ddp by that of the precision.
        "accumulate_allreduce_grads_in_fp32": (mixed or cfg.ddp).grad_reduce_in_fp32,
        **fields_of_peft(cfg.peft, model, name),
    }
    data["vocab_size"] = vocab_size or model.vocab_size or _vocabulary(name, cfg.tokenizer)
    if data.get("precision") == "fp8":
        # Bridge sets the model's recipe of fp8 from the mixed precision when a job starts.
        data["config"]["fp8_recipe"] = mixed.fp8_recipe
    return job_from(data, f"The recipe {name}")


@contextlib.contextmanager
def _fused_gradients() -> Iterator[None]:
    """Makes Bridge find the product that adds weight gradients to main_grad, as in the job, even if
    it is not installed here (utils/fusions.py `can_enable_gradient_accumulation_fusion`, a model's
    default)."""
    name = "fused_weight_gradient_mlp_cuda"
    found = sys.modules.get(name)
    sys.modules[name] = found or types.ModuleType(name)
    try:
        yield
    finally:
        if found is None:
            del sys.modules[name]


def _properties(gpu: Device, _: Any = None) -> types.SimpleNamespace:
    """What torch would say of the device."""
    major, minor = divmod(round(10 * gpu.capability), 10)
    name = f"NVIDIA {gpu.name.partition('-')[0].upper()}"
    return types.SimpleNamespace(major=major, minor=minor, name=name, total_memory=gpu.memory_bytes)


def _refuse(name: str, cfg: Any) -> None:
    if not hasattr(cfg.model, "position_embedding_type"):
        raise OptionError(
            f"The recipe {name} trains no language model ({type(cfg.model).__name__}), and others "
            "are not modelled without a device."
        )
    for part in ("ddp", "dist", "optimizer"):
        refuse_unmodelled(vars(getattr(cfg, part)), f"The recipe {name}: {part}.{{}}".format)
    found = [each for each in TOWERS if getattr(cfg.model, each, None) is not None]
    if found:
        raise OptionError(
            f"The recipe {name} has a tower before its decoder (model.{found[0]}), which is not "
            "modelled without a device: bytes and times would be those of the language model "
            "alone. In a job auto measures both."
        )


def _set_overlaps(name: str, cfg: Any, num_gpus: int) -> None:
    """Set on the model and on DDP what Bridge sets from comm_overlap when a job starts."""
    overlap = getattr(cfg, "comm_overlap", None)
    if overlap is None:
        return
    model = cfg.model
    overlap.data_parallel_size = num_gpus // (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    try:
        with (
            engine(NEWEST_TE),
            patched(importlib.import_module(type(overlap).__module__), "HAVE_TE", True),
        ):
            overlap.finalize()
            overlap.setup(model, cfg.optimizer, cfg.ddp)
    except (AssertionError, ValueError) as error:
        raise OptionError(f"Megatron Bridge refuses the recipe {name}: {error}") from error


def _model(model: Any) -> dict[str, Any]:
    from megatron_autorecompute.compat import model_facts, stage_layout

    config = stage_layout.transformer_config(model)
    fields = dataclasses.fields(model_facts.config_type(config.multi_latent_attention))
    known = {field.name: getattr(config, field.name, None) for field in fields}
    pattern = stage_layout.pattern_of(config)
    if pattern is not None:
        known["hybrid_layer_pattern"] = str(pattern)
        known["moe_layer_freq"] = None  # a default; the pattern says it
    return {
        "config": plain_config(known),
        "disable_parameter_transpose_cache": config.disable_parameter_transpose_cache,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
    }


def _vocabulary(name: str, tokenizer: Any) -> int:
    """The vocabulary of a recipe whose model does not say it."""
    if tokenizer.tokenizer_type != "NullTokenizer":
        raise OptionError(
            f"The recipe {name} leaves the vocabulary to its tokenizer "
            f"({tokenizer.tokenizer_model}), which is read when a job starts. Give --vocab-size N."
        )
    return int(tokenizer.vocab_size)


def _mixed_precision(cfg: Any) -> Any:
    mixed = cfg.mixed_precision
    if isinstance(mixed, str):
        from megatron.bridge.training.mixed_precision import get_mixed_precision_config

        mixed = get_mixed_precision_config(mixed)
    return mixed


def _gpus(config: Any) -> int:
    dense = config.tensor_model_parallel_size * config.context_parallel_size
    tensor = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    experts = config.expert_model_parallel_size * tensor if config.num_moe_experts else 1
    return int(config.pipeline_model_parallel_size * math.lcm(dense, experts))


def _recipe(recipes: Any, name: str) -> Any:
    """The recipe function; `perf_recipes.NAME` and `recipes.NAME` say which of two."""
    packages = {"recipes": recipes}
    if importlib.util.find_spec(PERF_RECIPES):
        packages["perf_recipes"] = importlib.import_module(PERF_RECIPES)
    asked, _, plain = name.rpartition(".")
    searched = {short: package for short, package in packages.items() if asked in ("", short)}
    found = {short: _function(package, plain) for short, package in searched.items()}
    found = {short: function for short, function in found.items() if function is not None}
    if len(found) > 1:
        names = " or ".join(f"{short}.{plain}" for short in found)
        raise OptionError(
            f"Megatron Bridge has two recipes {plain!r}, which may differ: give {names}."
        )
    if not found:
        names = " or ".join(package.__name__ for package in packages.values())
        raise OptionError(f"Megatron Bridge has no recipe function {name!r} under {names}.")
    return next(iter(found.values()))


def _function(package: Any, name: str) -> Any:
    if callable(found := getattr(package, name, None)):
        return found
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        found = getattr(importlib.import_module(module.name), name, None)
        if callable(found) and not dataclasses.is_dataclass(found):
            return found
    return None


def fields_of_peft(peft: Any, model: Any, name: str) -> dict[str, Any]:
    """A job's fields by Bridge's `cfg.peft`, and the model's config.

    Raises OptionError for what is not modelled.
    """
    if peft is None:
        return {}
    if type(peft).__name__ != "LoRA":
        raise OptionError(
            f"The recipe {name} trains with {type(peft).__name__} (peft), and of Bridge's methods "
            f"only LoRA is modelled without a device. {IN_A_JOB}"
        )
    experts = bool(model.num_moe_experts)
    # Some are of newer versions.
    counted = {
        "exclude_modules": True,
        "a2a_experimental": model.sequence_parallel,
        "sequence_parallel_input_regather": model.sequence_parallel,
        "normalize_moe_lora": experts,
        "experts_shared_outer_loras": experts,
    }
    on = [field for field, counts in counted.items() if counts and getattr(peft, field, None)]
    if experts and not getattr(peft, "share_expert_adapters", True):
        on.append("share_expert_adapters")
    if peft.dropout and peft.dropout_position != "pre":
        on.append("dropout_position")
    if on:
        found = " and ".join(f"peft.{field} {getattr(peft, field)!r:.80}" for field in on)
        raise OptionError(
            f"The recipe {name} sets {found}, which changes what adapters keep and is not modelled "
            f"without a device. {IN_A_JOB}"
        )
    return {
        "lora_rank": int(peft.dim),
        "lora_target_modules": list(peft.target_modules or ()),
        "lora_dropout": float(peft.dropout),
    }
