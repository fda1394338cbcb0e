"""A pytest plugin: every block that Megatron's config tells to recompute does it through us.

Upstream's tests set `recompute_granularity` and its like, some after construction, and look at them
again. So at each forward of a block these fields become the policy that says the same, which is
applied for that forward; what the tests see of the config stays as they set it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_autorecompute.compat import model_layers, rules, stage_layout
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.apply import apply

FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
counted = {"forwards": 0}


def pytest_configure() -> None:
    """Before any test is imported."""
    from megatron_autorecompute.runtime import config_field

    config_field.install()
    for block_type in model_layers.constructed_types():
        block_type.forward = _through_ours(block_type.forward)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often it happened: a run in which it never did proves nothing."""
    terminalreporter.write_line(f"forwards through our policies: {counted['forwards']}")


def _through_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        own = rules.own_recompute(block.config)
        if own is None or not block.training:
            return original(block, *args, **kwargs)
        config = block.config
        policy = RecomputePolicy.parse(
            own,
            num_layers=stage_layout.num_policy_layers(config),
            layout=stage_layout.counted_chunks(config),
            depth_layers=stage_layout.depth_layers(config),
        )
        counted["forwards"] += 1
        with _without_own(config), apply(policy, block, holder="through_ours"):
            return original(block, *args, **kwargs)

    return forward


@contextmanager
def _without_own(config: Any) -> Iterator[None]:
    """The config with Megatron's own recompute fields unset, for one forward."""
    set_to = {name: getattr(config, name) for name in FIELDS}
    for name in FIELDS:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in set_to.items():
            setattr(config, name, value)
