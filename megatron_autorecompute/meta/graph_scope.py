"""Which parts of a job run as CUDA graphs, by its config.

Megatron has renamed the fields. Up to 0.18 there is `cuda_graph_scope`, and `full_iteration` is one
of its values. Later there is `cuda_graph_modules`, and full_iteration is a `cuda_graph_impl`. This
module reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
"""The values of `cuda_graph_impl`."""
ITERATION = "full_iteration"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Parts of a layer that can be captured; none of them stands for whole layers."""
FIELDS = ("cuda_graph_modules", "cuda_graph_scope")
SAMPLE_BYTES = 8 + 8 + 4 + 8
"""The bytes of a token as the data loader gives it: token, label, loss mask, position
(Megatron-core datasets/gpt_dataset.py)."""


@dataclass(frozen=True, slots=True)
class GraphScope:
    """What is captured."""

    implementation: str = "none"
    """One of `IMPLEMENTATIONS`."""
    modules: tuple[str, ...] = ()
    """The captured modules of each layer; empty: all of it. Nothing with `full_iteration`."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GraphScope:
        """The scope by fields of Megatron's TransformerConfig, as `check_config` accepts them."""
        old = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
        impl = next((name for field, name in old.items() if config.get(field)), "none")
        impl = config.get("cuda_graph_impl") or impl
        names = [name for field in FIELDS for name in names_of(config.get(field))]
        if impl == "none":
            return cls()
        if impl == ITERATION or ITERATION in names:
            return cls(ITERATION)
        return cls(impl, tuple(name for name in dict.fromkeys(names) if name in MODULES))

    @property
    def of_iteration(self) -> bool:
        """Whether all forwards and backwards are one graph."""
        return self.implementation == ITERATION

    @property
    def of_layers(self) -> bool:
        """Whether layers, or parts of them, are graphs."""
        return self.implementation in ("local", "transformer_engine")


def names_of(value: Any) -> list[str]:
    """The names of a scope, which Megatron takes as a list, or in one text with commas."""
    names = value.replace(",", " ").strip("[] ").split() if isinstance(value, str) else value or []
    return [str(name) for name in names]


def wrong_scope(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with these fields, one sentence each."""
    impl, wrong = config.get("cuda_graph_impl"), []
    if impl is not None and impl not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        wrong.append(f"config.cuda_graph_impl: {impl!r:.80}; known are {known}")
    for field in FIELDS:
        value = config.get(field)
        if not isinstance(value, (str, list, type(None))):
            wrong.append(f"config.{field}: {value!r:.80}; give a list such as [attn, mlp]")
            continue
        others = ("full", ITERATION, "full_iteration_inference")
        unknown = [name for name in names_of(value) if name not in (*MODULES, *others)]
        if unknown:
            known = ", ".join((*MODULES, *others[:2]))
            wrong.append(f"config.{field}: {', '.join(unknown):.80}; known are {known}")
    return wrong
