"""Which megatron-core is installed, and how it differs from other versions."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import megatron.core
from packaging.version import Version

from megatron_autorecompute.errors import UnsupportedVersionError

TESTED = ("0.16.1", "0.19.2")
OLDEST, NEWEST = Version("0.16.0"), Version("0.21.0.dev0")


def installed() -> Version:
    """The installed megatron-core's version.

    Raises UnsupportedVersionError: it is outside the versions whose sources `compat` describes.
    """
    found = Version(megatron.core.__version__)
    if not OLDEST <= found < NEWEST:
        raise UnsupportedVersionError(
            f"megatron-core {found} is installed; this package knows 0.16 to 0.20 and is tested "
            f"with {' and '.join(TESTED)}. Install one of these, or a newer megatron-autorecompute."
        )
    return found


def uniform_needs_whole_groups() -> bool:
    """Whether `uniform` fails if a chunk's layers are not a multiple of N (0.16: IndexError)."""
    return installed() < Version("0.17.0")


def frees_outputs_being_sent() -> bool:
    """Whether the schedule frees an output that gloo is still sending (through 0.17)."""
    return installed().release < (0, 18)


def fused_kernels() -> ModuleType | None:
    """The module that `megatron.training` compiles with nvcc at start (0.16); None since 0.17."""
    from megatron.training import initialize

    return getattr(initialize, "fused_kernels", None)


def compiles_shared_storage() -> bool:
    """Whether a recomputed output gets its storage from C++ compiled at run time (since 0.17)."""
    from megatron.core.tensor_parallel import random

    return hasattr(random, "_get_share_storage")


def asks_for_inference_layers() -> bool:
    """Whether layers of MTP ask if a projection is one of inference's (main of August 2026)."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "is_inference_column_parallel_linear")


def unbound_te_names() -> list[tuple[ModuleType, str]]:
    """(module, name): names that a module uses but binds only with Transformer Engine (0.16)."""
    from megatron.core.transformer.moe import moe_utils

    fused = ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index")
    names = ["te_general_gemm", *(f"fused_{name}" for name in fused)]
    names.append("fused_sort_chunks_by_index_with_probs")
    return [(moe_utils, name) for name in names if not hasattr(moe_utils, name)]


def auxiliary_loss_log() -> tuple[ModuleType, str, Any]:
    """Where the process logs auxiliary losses by layer: module, attribute, and its empty value.

    In older versions a dictionary in moe_utils, in newer ones an object in moe_logging that is made
    at its first use.
    """
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
        return moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}
    from megatron.core.transformer.moe import moe_logging

    return moe_logging, "_MOE_METRICS_TRACKER", None


def schedule_nodes() -> ModuleType:
    """The module with EP overlap's `should_free_input` (moved in 0.19)."""
    name = "megatron.core.models.common.utils"
    if importlib.util.find_spec(name) is None:
        name = "megatron.core.models.gpt.fine_grained_callables"
    return importlib.import_module(name)
