"""Parts of hybrid models: their layer spec with other modules, and a function that moved."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
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


def places_of_packed_tokens() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """The function by which Gated DeltaNet finds a rank's packed tokens: the module below
    megatron.core that calls it, its name, and itself.

    Upstream: 0.19's gdn.py imports it from common.py; main's common.py calls it.
    """
    name = "_build_thd_cp_a2a_perm"
    for module in ("ssm.gated_delta_net.gdn", "ssm.gated_delta_net.common"):
        function = getattr(importlib.import_module("megatron.core." + module), name, None)
        if function is not None:
            yield module, name, function
