"""Arguments of a run, as the flags of pretrain_gpt.py that bear on the bytes of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WITHOUT_BEARING = (
    *("adam-", "async-", "auto-detect-ckpt-format", "check-weight-hash", "clip-grad"),
    *(
        "ckpt-assume",
        "ckpt-fully",
        "data-cache-path",
        "data-path",
        "dataloader-type",
        "decoupled-",
    ),
    *("dist-ckpt-", "distributed-backend", "distributed-timeout", "empty-unused-memory-level"),
    *("enable-experimental", "eval-", "exit-", "fim-", "finetune", "high-priority-stream-groups"),
    *("init-method-std", "legacy-tokenizer", "load", "log-", "logging-level", "lr", "manual-gc"),
    *("merge-file", "min-lr", "mock-data", "muon-", "no-check-for-nan", "no-ckpt-", "no-load-"),
    *("no-mmap-bin-files", "norm-epsilon", "num-workers", "override-opt", "save", "seed"),
    *("split", "straggler-", "tensorboard-", "tiktoken-pattern", "timing-log", "tokenizer-"),
    *("train-", "use-checkpoint-", "use-persistent-ckpt-worker", "verify-integrity", "vocab-file"),
    *("wandb-", "weight-decay", "tp-comm-overlap-cfg", "te-rng-tracker", "disable-gloo"),
    *("use-mcore-models",),
)
"""How flags begin that change no size: of data, checkpoints, logs and the optimizer's rates."""


class FieldError(ValueError):
    """A field that cannot be read; the message names it."""


def arguments(text: str, column: str) -> dict[str, Any]:
    """The JSON object of a cell."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise FieldError(f"{column}: {error}") from error
    if not isinstance(found, dict):
        raise FieldError(f"{column}: an object of flags is needed, not {text[:40]!r}")
    return found


def flags(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags by their names without dashes, as a command line has them; a list is `[a b]`."""
    found: list[str] = []
    for name in sorted(given):
        value = given[name]
        if name.startswith(WITHOUT_BEARING) or value is False:
            continue
        found.append(f"--{name}")
        if value is not True:
            found += _values(name, value)
    return tuple(found)


def _values(name: str, value: Any) -> list[str]:
    if isinstance(value, (int, float)):
        return [str(value)]
    if not isinstance(value, str):
        raise FieldError(f"--{name}: a number, a text or true is needed, not {value!r:.40}")
    if "${" in value:
        raise FieldError(f"--{name}: {value} is a variable of the test's environment")
    text = value.replace("\\", "").strip("\"'")  # as the shell reads it
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    elif not text.replace(" ", "").isdigit():
        return [text]
    return text.split()


def number(given: Mapping[str, Any], name: str) -> int:
    """The whole number that a flag is given."""
    try:
        return int(given[name])
    except (TypeError, ValueError, OverflowError) as error:
        raise FieldError(f"--{name}: a whole number is needed, not {given[name]!r:.40}") from error


def milliseconds(row: Mapping[str, str], column: str, unit_ms: float) -> float | None:
    """A positive time of a cell, in `unit_ms`; None if it is empty."""
    text = row.get(column) or ""
    try:
        number = float(text) if text else 1.0
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise FieldError(f"{column}: a time above 0 is needed, not {text!r}")
    return number * unit_ms if text else None


def whole(row: Mapping[str, str], column: str, least: int = 1) -> int:
    """A whole number of a cell, not below `least`."""
    text = row.get(column) or ""
    try:
        number = int(float(text))
    except (ValueError, OverflowError):
        number = least - 1
    if number < least or number != float(text):
        raise FieldError(f"{column}: a whole number above {least - 1} is needed, not {text!r}")
    return number
