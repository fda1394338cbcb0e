"""Everything that a job's measurements depend on, as text: the same on every rank and start.

It contains all settings that can change the bytes or times of a layer, whatever their type. It does
not contain settings that need only a new solve (budget, reserve, microbatches, percentile), objects
that the running job puts into its configs (timers, callbacks), or settings that change results but
neither bytes nor times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from megatron_autorecompute import __version__
from megatron_autorecompute.compat import layer_parts, model_layers, untyped, versions
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.runtime.ranks import all_gather

NOT_OF_A_STEP = ("_", "recompute_", "inference_", "config_logger_dir")
"""Prefixes of fields that are left out: private, recompute, inference, and the log folder."""
SAME_STEP = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "clip_grad"),
    *("grad_norm_skip_threshold", "loss_scale", "initial_loss_scale", "min_loss_scale"),
    *("loss_scale_window", "hysteresis", "adam_beta1", "adam_beta2", "adam_eps"),
    *("init_method_std", "embedding_init_method_std", "layernorm_epsilon"),
    "perform_initialization",
)
"""Fields of a model or an optimizer that change results, but neither bytes nor times; a restart
often changes them."""
VARIABLES = (
    *("NVTE_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE"),
    *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"),
)
"""Prefixes of environment variables that choose or fuse kernels, let them overlap, set the size of
their workspaces, or change how the allocator splits memory."""
KERNELS = ("transformer-engine", "flash-attn", "triton")
"""Packages whose kernels a step may run."""


def fingerprint(
    chunks: Sequence[torch.nn.Module], optimizer: Any, layout: Layout, given: Mapping[str, str]
) -> dict[str, str]:
    """The facts that must be equal for a plan to be used again, by name, `given` ones included."""
    first = model_layers.unwrapped(chunks[0])
    mine = {
        **_fields(first.config),
        **_fields(getattr(chunks[0], "ddp_config", None), "ddp."),
        **_fields(getattr(optimizer, "config", None), "optimizer."),
        **_attributes(first),
        "model": type(first).__name__,
        "wrappers": " ".join(_wrappers(chunks[0])),
        "optimizer": " ".join(_optimizers(optimizer)),
        "modules": hashlib.sha256("".join(_modules(chunks)).encode()).hexdigest()[:16],
        "layers": "|".join(" ".join(map(_chunk, chunks)) for chunks in layout.stages),
        "world_size": str(len(all_gather(None))),
        "torch": str(torch.__version__),
        "megatron-core": str(versions.installed()),
        "megatron-autorecompute": __version__,
        "python": platform.python_version(),
        **kernels(),
        **{name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        **given,
    }
    return _merged(all_gather(mine))


def kernels() -> dict[str, str]:
    """Versions of the loaded packages whose kernels a step may run, by name."""
    loaded = ((name, sys.modules.get(name.replace("-", "_"))) for name in KERNELS)
    return {name: str(getattr(one, "__version__", "unknown")) for name, one in loaded if one}


def _merged(by_rank: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Every entry once; if ranks differ, as stages do, with all of their values."""
    values = defaultdict[str, set[str]](set)
    for name, value in itertools.chain.from_iterable(one.items() for one in by_rank):
        values[name].add(value)
    return {name: " / ".join(sorted(values[name])) for name in sorted(values)}


def _fields(config: Any, prefix: str = "") -> dict[str, str]:
    """Fields of a dataclass config that differ from their defaults; empty for other objects."""
    if not dataclasses.is_dataclass(config):
        return {}
    found = {}
    for field in dataclasses.fields(config):
        if field.name.startswith(NOT_OF_A_STEP) or field.name in SAME_STEP:
            continue
        declared = str(field.type)
        if field.default is None and ("Callable" in declared or "ContextManager" in declared):
            continue  # for objects of the running job: timers, callbacks, initialisers
        makes = field.default_factory
        default = field.default if makes is dataclasses.MISSING else makes()
        value = rendered(getattr(config, field.name, None))
        if value != rendered(default):
            found[prefix + field.name] = value
    return found


def rendered(value: Any) -> str:
    """Text that is equal for equal values; it never contains an address.

    Tuples and lists give the same text, because a config that is read from a file has lists.
    """
    if isinstance(value, Mapping):
        value = sorted(f"{rendered(key)}: {rendered(item)}" for key, item in value.items())
    elif isinstance(value, (set, frozenset)):
        value = sorted(map(rendered, value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(rendered, value))}]"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _attributes(model: torch.nn.Module) -> dict[str, str]:
    """Arguments of the model's constructor besides its config: vocabulary, ..."""
    return {
        f"model.{name}": rendered(value)
        for name, value in vars(model).items()
        if isinstance(value, (bool, int, float, str, Enum))
        and not name.startswith("_")
        and name != "training"
    }


def _wrappers(chunk: untyped.Chunk) -> Iterator[str]:
    while hasattr(chunk, "module"):
        yield type(chunk).__name__
        chunk = chunk.module


def _optimizers(optimizer: Any) -> list[str]:
    """The types of the optimizers, each with the inner optimizer that holds the state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return sorted(
        {f"{type(p).__name__}({type(getattr(p, 'optimizer', None)).__name__})" for p in parts}
    )


def _modules(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Structure and shapes of all chunks of all ranks, and which parameters are trained."""
    mine = {
        f"{layer_parts.signature(model_layers.unwrapped(chunk))} "
        + " ".join(name for name, one in chunk.named_parameters() if not one.requires_grad)
        for chunk in chunks
    }
    return sorted(set().union(*all_gather(mine)))


def _chunk(chunk: Chunk) -> str:
    """Its layers, E embedding and L loss: `E0-3`."""
    layers = f"{chunk.layers[0]}-{chunk.layers[-1]}" if chunk.layers else "-"
    return f"{'E' * chunk.embedding}{layers}{'L' * chunk.head}"
