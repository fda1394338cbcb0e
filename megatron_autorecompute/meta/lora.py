"""Which linear layers of a job have LoRA's adapters, and what of Bridge's PEFT is not modelled.

Neither torch nor Megatron is imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_autorecompute.errors import OptionError

DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The default targets of Bridge's LoRA (peft/lora.py)."""
TARGETS = (
    *DEFAULT_TARGETS,
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "linear_qkv_down_proj"),
    *("linear_wq_b", "linear_wk", "linear_weights_proj"),
    *("in_proj", "out_proj", "eh_proj", "fc1_latent_proj", "fc2_latent_proj"),
)
"""Names that megatron-core's layers give their linear layers."""
_OF_LAYERS = re.compile(r"layers\.[^*]")
_IN_A_JOB = "In a job auto measures each layer."


def check_targets(targets: Sequence[str], source: str) -> None:
    """Raise OptionError for targets that are not modelled; patterns have an asterisk."""
    if not targets:
        raise OptionError(
            f"{source}: lora_rank is given and lora_target_modules names no layer. Name some of "
            f"{', '.join(TARGETS)}."
        )
    for target in targets:
        if _OF_LAYERS.search(target):
            raise OptionError(
                f"{source}: adapters are on some layers only ({target!r:.80} in "
                "lora_target_modules), and are modelled on every layer: what runs before the first "
                f"of them would be counted as kept. {_IN_A_JOB}"
            )
        if target.rpartition(".")[-1].strip("*") not in TARGETS:
            raise OptionError(
                f"{source}: lora_target_modules names {target!r:.80}, and adapters are known of "
                f"{', '.join(TARGETS)}. Give these names, or patterns that end in one, such as "
                "*.mlp.linear_fc1."
            )


def fields_of_peft(peft: Any, model: Any, name: str) -> dict[str, Any]:
    """A job's fields by Bridge's `cfg.peft`, and the model's config.

    Raises OptionError for what is not modelled.
    """
    if peft is None:
        return {}
    if type(peft).__name__ != "LoRA":
        raise OptionError(
            f"The recipe {name} trains with {type(peft).__name__} (peft), and of Bridge's methods "
            f"only LoRA is modelled without a device. {_IN_A_JOB}"
        )
    found = [f"peft.{field} {getattr(peft, field)!r:.80}" for field in _unmodelled(peft, model)]
    if found:
        raise OptionError(
            f"The recipe {name} sets {' and '.join(found)}, which changes what adapters keep and "
            f"is not modelled without a device. {_IN_A_JOB}"
        )
    return {
        "lora_rank": int(peft.dim),
        "lora_target_modules": list(peft.target_modules or ()),
        "lora_dropout": float(peft.dropout),
    }


def _unmodelled(peft: Any, model: Any) -> list[str]:
    """Settings of Bridge's LoRA, some of them of newer versions, that are on and matter."""
    on = ["exclude_modules"]
    if model.sequence_parallel:
        on += ["a2a_experimental", "sequence_parallel_input_regather"]
    if model.num_moe_experts:
        on += ["normalize_moe_lora", "experts_shared_outer_loras"]
    found = [field for field in on if getattr(peft, field, None)]
    if model.num_moe_experts and not getattr(peft, "share_expert_adapters", True):
        found.append("share_expert_adapters")
    if peft.dropout and peft.dropout_position != "pre":
        found.append("dropout_position")
    return found
