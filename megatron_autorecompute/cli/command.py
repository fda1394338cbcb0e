"""What a command is, and the readers of single arguments. Impossible values are wrong usage, which
argparse reports."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from megatron_autorecompute.units import GIB, MOST_GIB


class Command(ABC):
    """One command of `megatron-autorecompute`: its flags, and what it does with them."""

    description: ClassVar[str | None] = None
    """Text of the command's `--help`, above its flags."""
    takes_megatron_flags: ClassVar[bool] = False
    """Whether flags of pretrain_gpt.py may follow `--`; `run` finds them in `megatron_flags`."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments that are files it reads: no output may replace one of them."""

    @abstractmethod
    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the command's own flags to its parser."""

    @abstractmethod
    def run(self, args: Namespace) -> None:
        """Run the command and print the result; an AutorecomputeError ends the program."""


def number_of_gib(text: str) -> float:
    """A number of GiB, 0 included."""
    value = _number(text)
    if not 0 <= value <= MOST_GIB:
        raise ArgumentTypeError(f"{text!r}: give GiB as a number from 0 to {MOST_GIB}")
    return value


def budgets(text: str) -> tuple[int, ...]:
    """Bytes of every budget in a list of GiB such as `72` or `72,60.5`."""
    values = tuple(round(number_of_gib(part) * GIB) for part in text.split(","))
    if 0 in values:
        raise ArgumentTypeError(f"{text!r}: a budget is more than 0 GiB, a byte at least")
    return values


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on in a list such as `1,2,4`."""
    return tuple(at_least(1)(part) for part in text.split(","))


def percentile(text: str) -> float:
    """A percentile, above 0 and at most 100."""
    value = _number(text)
    if not 0 < value <= 100:
        raise ArgumentTypeError(f"{text!r}: a percentile is above 0 and at most 100")
    return value


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers within these limits."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limit = "or more" if most is None else f"to {most}"
            raise ArgumentTypeError(f"{text!r}: give a whole number, {least} {limit}")
        return value

    return read


def file(text: str) -> Path:
    """A path that names a file; `-` is standard output."""
    if not Path(text).name or os.path.isdir(text) or "\0" in text:
        raise ArgumentTypeError(f"{text!r} is no file name")
    return Path(text)


def picture(text: str) -> Path:
    """A path that names a PNG or SVG file."""
    path = file(text)
    if path.suffix not in (".png", ".svg"):
        raise ArgumentTypeError(f"{text!r}: give a name that ends with .png or .svg")
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # outside every range
