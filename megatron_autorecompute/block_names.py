"""Policies by the names of a model's blocks: `vision:full*24;decoder:none*32`.

A policy is one list over all layers, and its blocks follow each other in it: a vision tower or an
encoder first, then the decoder with its multi-token-prediction depths. Here names and sizes become
places in that list; what stands behind a name is read by `policy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_autorecompute.errors import PolicyError

DECODER = "decoder"
"""The block that computes the loss; in most models the only one."""
ENCODER = "encoder"
"""T5's: every layer of its decoder reads the encoder's output."""
Blocks = Mapping[str, int]
"""Layers of each block by name, in the order of a policy."""

_NAMED = re.compile(r"\s*(?P<name>(?!megatron\s*:)[a-z][a-z0-9_]*)\s*:(?P<text>.*)", re.DOTALL)


def named_parts(text: str) -> dict[str, str] | None:
    """What a text says for each block; None if it names no block.

    Raises:
        PolicyError: only some parts have a name, or two have the same.
    """
    if _NAMED.fullmatch(text.partition(";")[0]) is None:
        return None
    parts: dict[str, str] = {}
    for part in text.split(";"):
        match = _NAMED.fullmatch(part)
        if match is None or match["name"] in parts:
            raise PolicyError(
                f"Cannot read {part.strip()!r} in {text!r}: write NAME:POLICY for every block, "
                "as in vision:full*24;decoder:none*32."
            )
        parts[match["name"]] = match["text"].strip()
    return parts


def parts_of_field(value: Any) -> Mapping[str, Any] | None:
    """What the value of a config field says for each block, as text or as a dict with the
    decoder's name; None if it names no block.

    Raises:
        PolicyError: as `named_parts`.
    """
    if isinstance(value, Mapping):
        return value if DECODER in value else None
    return named_parts(value) if isinstance(value, str) else None


def placed(parts: Mapping[str, Any], blocks: Blocks) -> list[tuple[Any, range]]:
    """What is said for each block, in the model's order, and the block's layers.

    Raises:
        PolicyError: a name that no block has, or a block without a part.
    """
    found = " and ".join(f"{name} ({count} layers)" for name, count in blocks.items())
    for what, names in (
        ("names", [name for name in parts if name not in blocks]),
        ("says nothing of", [name for name in blocks if name not in parts]),
    ):
        if names:
            example = ";".join(f"{name}:none*{count}" for name, count in blocks.items())
            raise PolicyError(
                f"The policy {what} {', '.join(names)}; this model's blocks are {found}. Give each "
                f"of them a part, as in {example}."
            )
    spans, start = [], 0
    for name, count in blocks.items():
        spans.append((parts[name], range(start, start + count)))
        start += count
    return spans


def within(layout: Sequence[Sequence[int]] | None, span: range) -> list[list[int]] | None:
    """The chunks of a layout in a block, counted from the block's first layer."""
    if layout is None:
        return None
    chunks = [[index - span.start for index in chunk if index in span] for chunk in layout]
    return [chunk for chunk in chunks if chunk]
