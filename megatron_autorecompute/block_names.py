"""Policies by the names of a model's blocks: `vision:full*24;decoder:none*32`.

A policy is one list over all layers. The blocks follow each other in this list: a vision tower or
an encoder first, then the decoder with its multi-token-prediction depths. This module turns names
and sizes into places in the list; `policy` reads what stands behind a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_autorecompute import json_records
from megatron_autorecompute.errors import PolicyError

DECODER = "decoder"
"""The block that computes the loss; in most models the only one."""
ENCODER = "encoder"
"""The block in front of T5's decoder, whose every layer reads the encoder's output."""
Blocks = Mapping[str, int]
"""Layers of each block by name, in the order of a policy."""
MEGATRON = "megatron:"
"""What stands in front of a policy whose choices run as in Megatron's own checkpoints, and in front
of the names of Megatron's settings."""

_NAMED = re.compile(r"\s*(?P<name>(?!megatron\s*:)[a-z][a-z0-9_]*)\s*:(?P<text>.*)", re.DOTALL)


def named_parts(text: str) -> dict[str, str] | None:
    """What a text says for each block; None if it names no block.

    Raises: PolicyError if only some parts have a name, or two have the same."""
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


def policy_in(value: Any) -> Any:
    """What the value of a config field, or a file's content, says: text, a list of choices, or a
    dict with one of these for each block."""
    if not isinstance(value, Mapping):
        return value
    said = value.get("recompute_policy", value.get("policy", value))
    return said if said is value else _of_plan(value, said) or policy_in(said)


def _of_plan(plan: Mapping[str, Any], said: Any) -> dict[str, Any] | None:
    """What a plan for a model of several blocks says for each; None for anything else."""
    try:
        model = plan["profile"]["model"]
        cut = int(model.get("encoder_layers", 0))
        return {model["encoder_name"]: said[:cut], DECODER: said[cut:]} if cut else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def parts_of_field(value: Any) -> Mapping[str, Any] | None:
    """What the value of a config field says for each block, as text or as a dict with the decoder's
    name; None if it names no block. Raises: PolicyError as `named_parts`."""
    said = policy_in(value)
    if isinstance(said, str):
        parts = named_parts(said.removeprefix(MEGATRON).strip())
        if parts is None or not said.startswith(MEGATRON):
            return parts
        return {name: as_megatrons(part) for name, part in parts.items()}
    return said if isinstance(said, Mapping) and DECODER in said else None


def as_megatrons(value: Any) -> Any:
    """The value of a config field in which every choice is as Megatron's own checkpoints run it."""
    if isinstance(value, str):
        return value if value.startswith(MEGATRON) else f"{MEGATRON}{value}"
    said = policy_in(value)
    if isinstance(said, Mapping):
        named = DECODER in said
        return {name: as_megatrons(part) for name, part in said.items()} if named else value
    return as_megatrons(said if isinstance(said, str) else ",".join(f"{one}*1" for one in said))


def named_file(value: Any) -> str | None:
    """The FILE of a field's value @FILE or megatron:@FILE; None if it names none."""
    text = value.removeprefix(MEGATRON) if isinstance(value, str) else ""
    return text[1:] if text.startswith("@") else None


def read_file(path: str | Path) -> Any:
    """The text of a policy file, or what its JSON says.

    Raises: PolicyError if it cannot be read, or is larger than `json_records.MOST_BYTES`."""
    if not str(path):
        raise PolicyError("The policy @ names no file: write @FILE, such as @plan.json.")
    try:
        text = json_records.read_text(path)
    except (OSError, ValueError) as error:
        why = json_records.reason(error)
        raise PolicyError(f"Cannot read the policy file {path}: {why}.") from error
    if not text.strip():
        raise PolicyError(f"The policy file {path} is empty.")
    if text.lstrip()[:1] not in ("{", "["):
        return text.strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path} is not whole JSON: {error}.") from error


def placed(parts: Mapping[str, Any], blocks: Blocks) -> list[tuple[str, Any, range]]:
    """Every block in the model's order: its name, what is said for it, and its layers.

    Raises: PolicyError for a name that no block has, or a block without a part."""
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
        spans.append((name, parts[name], range(start, start + count)))
        start += count
    return spans


def within(layout: Sequence[Sequence[int]] | None, span: range) -> list[list[int]] | None:
    """The chunks of a layout in a block, counted from the block's first layer."""
    if layout is None:
        return None
    chunks = [[index - span.start for index in chunk if index in span] for chunk in layout]
    return [chunk for chunk in chunks if chunk]
