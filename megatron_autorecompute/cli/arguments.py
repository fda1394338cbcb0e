"""Flags of several commands, and the readers of single arguments. Impossible values are wrong
usage, which argparse reports."""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from megatron_autorecompute.units import GIB, MOST_GIB


def add_json(parser: ArgumentParser) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_output(parser: ArgumentParser, metavar: str, help: str) -> None:
    """Add the flag `-o`, which `output_file` reads."""
    parser.add_argument("-o", "--output", type=file, metavar=metavar, help=help)


def add_verbose(parser: ArgumentParser) -> None:
    """Add the flag `-v`, of commands that also have `--json`."""
    parser.add_argument("-v", "--verbose", action="store_true", help="list every assumption")


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
