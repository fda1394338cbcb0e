"""Per-layer activation recompute for Megatron-Core: measured, solved, applied.

Importing this package imports neither torch nor megatron and changes nothing. Its public names:

- `RecomputePolicy`, `LayerPolicy`: what every layer recomputes, and its text.
- `Profile`: what each choice costs, read from a file or measured.
- `Layout`, `Schedule`: which pipeline stage holds which layers, and in which order they run.
- `Problem`: a profile, a layout, a schedule and a budget; `solve(problem)`: the fastest policy that
  fits, and the proof.
- `Plan`: a policy with its predicted cost, the proof and the profile, as one file.
- `apply(policy, model)`: make a built model recompute as a policy says.
- `attach(model_chunks, optimizer)`: let a training loop over Megatron-Core choose by itself.
- `FixedCalls`: what every training call of such a loop has, where it may offload.

The last three need torch and megatron-core.

docs/api.md has an example and lists the modules for further use. Every error that is raised on
purpose is an `errors.AutorecomputeError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_autorecompute.planner.cost.layout import Layout
    from megatron_autorecompute.planner.cost.schedule import Schedule
    from megatron_autorecompute.planner.plan import Plan
    from megatron_autorecompute.planner.search.problem import Problem
    from megatron_autorecompute.planner.search.solve import solve
    from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
    from megatron_autorecompute.profile import Profile
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.attach import attach
    from megatron_autorecompute.runtime.job_facts import FixedCalls


__version__ = "0.1.0"
__all__ = [
    "FixedCalls",
    "LayerPolicy",
    "Layout",
    "Plan",
    "Problem",
    "Profile",
    "RecomputePolicy",
    "Schedule",
    "__version__",
    "apply",
    "attach",
    "solve",
]

_HOME = {
    "LayerPolicy": "policy",
    "RecomputePolicy": "policy",
    "Profile": "profile",
    "Layout": "planner.cost.layout",
    "Schedule": "planner.cost.schedule",
    "Plan": "planner.plan",
    "attach": "runtime.attach",
    "FixedCalls": "runtime.job_facts",
    "Problem": "planner.search.problem",
    "solve": "planner.search.solve",
}


def __getattr__(name: str) -> Any:
    if name == "apply":
        # The module, which can be called: importing it binds this name to it anyway.
        return importlib.import_module(f"{__name__}.apply")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
