"""Handles standard output and error that are closed, full, or lack a character of the text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # --help needs no rich
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def prepare() -> None:
    """Make every print possible: a closed stream is the null device, and a character that the
    stream's encoding lacks is written as its escape."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the whole program
        with suppress(AttributeError, ValueError):  # not a file's stream
            getattr(sys, name).reconfigure(errors="backslashreplace")


def give_up() -> None:
    """Forget what standard output and error cannot take.

    The interpreter flushes both once more at its end; that must not fail again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write(text: str) -> None:
    """Write a file's text on standard output, in UTF-8 as in a file."""
    sys.stdout.flush()
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:
        sys.stdout.write(text)
    else:
        binary.write(text.encode())


def say(text: str) -> None:
    """Print one message on standard error, if that takes it."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with all that a terminal would obey, or not show, written as an escape."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class Printable:
    """A view whose texts are `printable`, even if they come from a file."""

    def __init__(self, view: RenderableType) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._view, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
