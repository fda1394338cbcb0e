"""Megatron's layer spec of hybrid models, with other modules in Transformer Engine's places."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from megatron_autorecompute.patched import patched


def with_modules(modules: Mapping[str, Any], provider: type) -> Any:
    """`hybrid_stack_spec` of `hybrid_layer_specs.py`, whose code runs here once more.

    It names Transformer Engine's modules at import, and without Transformer Engine gets mocks.

    Args:
        modules: by Transformer Engine's name in `megatron.core.extensions.transformer_engine`.
        provider: stands for TESpecProvider, from which MoE layers are made.
    """
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    moe = importlib.import_module("megatron.core.models.gpt.moe_module_specs")
    found: Any = importlib.util.find_spec("megatron.core.models.hybrid.hybrid_layer_specs")
    module = importlib.util.module_from_spec(found)
    with contextlib.ExitStack() as undo:
        for name, stand_in in modules.items():
            undo.enter_context(patched(engine, name, stand_in))
        undo.enter_context(patched(moe, "TESpecProvider", provider))
        found.loader.exec_module(module)
    return module.hybrid_stack_spec
