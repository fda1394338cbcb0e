"""Types of Megatron's modules for mypy.

Megatron has no types, and torch types every attribute of a module as a tensor or a module.
"""

from typing import Any, TypeAlias

Chunk: TypeAlias = Any
"""A torch.nn.Module: a model chunk, wrapped or bare."""

Block: TypeAlias = Any
"""A TransformerBlock, HybridStack or MultiTokenPredictionLayer."""

Layer: TypeAlias = Any
"""An element of a block's `layers`, or a MultiTokenPredictionLayer."""
