"""slime and miles, with nothing changed in them:

    cp examples/loops/slime_hook.py .    # slime has a package `examples` of its own
    --custom-megatron-before-train-step-hook-path slime_hook.before_train_step

They call the hook in `train_one_step`, between zeroing the gradients and looking up
`get_forward_backward_func` in their module. The first call attaches, and watches that module.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_autorecompute import attach

MODULES = ("slime.backends.megatron_utils.model", "miles.backends.megatron_utils.model")
"""Where `train_one_step` is."""
_attached: dict[int, Any] = {}


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """The hook; the arguments are theirs. They may run it for several models (actor, critic)."""
    if id(model[0]) not in _attached:
        path = getattr(args, "recompute_plan_path", None)
        limit = args.max_tokens_per_gpu
        budget = getattr(args, "recompute_memory_budget_gib", None)
        auto = attach(model, optimizer, max_tokens=limit, plan_path=path, budget_gib=budget)
        _attached[id(model[0])] = auto
        for name in MODULES:
            if name in sys.modules:
                auto.watch(sys.modules[name])


def attached(model: Any) -> Any:
    """What is attached to a model."""
    return _attached[id(model[0])]
