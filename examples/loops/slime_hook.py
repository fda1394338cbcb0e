"""slime and miles, with nothing changed in them:

    --custom-megatron-before-train-step-hook-path examples.loops.slime_hook.before_train_step

They call the hook in `train_one_step`, between zeroing the gradients and looking up
`get_forward_backward_func` in their module. The first call attaches, and replaces that name.
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
                _watch(sys.modules[name], model, auto)


def attached(model: Any) -> Any:
    """What is attached to a model."""
    return _attached[id(model[0])]


def _watch(module: Any, model: Any, auto: Any) -> None:
    look_up = module.get_forward_backward_func

    def get_forward_backward_func() -> Any:
        plain = look_up()
        watched = auto.schedule(plain)

        def call(*args: Any, **named: Any) -> Any:
            return (watched if named["model"] is model else plain)(*args, **named)

        return call

    module.get_forward_backward_func = get_forward_backward_func
