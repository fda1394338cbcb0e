"""What the installed Megatron's own validator allows, from its messages."""

from __future__ import annotations

import functools
import re
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat import versions
from megatron_autorecompute.errors import UnsupportedVersionError


def allowed_modules() -> tuple[str, ...]:
    """The installed Megatron's `recompute_modules`, from its validator's own message.

    Raises:
        UnsupportedVersionError: the validator no longer lists them.
    """
    return _listed("recompute_modules", recompute_granularity="selective")


def allowed_offload_modules() -> tuple[str, ...]:
    """The installed Megatron's `offload_modules`, likewise."""
    return _listed("offload_modules", fine_grained_activation_offloading=True)


@functools.cache
def _listed(field: str, **fields: Any) -> tuple[str, ...]:
    """The values that the validator of a field allows, from its message about another one."""
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    try:
        TransformerConfig(**sizes, **fields, **{field: ["?"]})
    except (AssertionError, ValueError) as error:
        found = re.findall(r"'(\w+)'", str(error).split("Allowed", 1)[-1])
        if found:
            return tuple(sorted(found))
    raise UnsupportedVersionError(
        f"megatron-core {versions.installed()} does not say which {field} it allows; "
        f"tested are {', '.join(versions.TESTED)}."
    )
