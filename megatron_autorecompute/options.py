"""Command-line flags made from dataclass fields, which have their name, default and help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: what is wrong, and where all flags are listed."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.exit(2, f"{self.prog}: {message}. All flags: {self.prog} --help\n")


def option(default: Any, help: str) -> Any:
    """A dataclass field that is also a command-line flag with this help, one sentence."""
    return dataclasses.field(default=default, metadata={"help": help})


def add_flags(parser: argparse.ArgumentParser, options: type, defaults: Any = None) -> None:
    """Give the parser a flag for every field made with `option`, in one argument group, titled
    with the first line of the dataclass's docstring; an instance's values as `defaults` replace
    the fields' own."""
    group = parser.add_argument_group((options.__doc__ or "").splitlines()[0].rstrip("."))
    types = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if "help" not in field.metadata:
            continue
        default = field.default if defaults is None else getattr(defaults, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        shown = "" if default is None else f" (default: {default})"
        if types[field.name] is bool:
            reader: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            given = [t for t in typing.get_args(types[field.name]) if t is not type(None)]
            reader = {"type": given[0] if given else types[field.name]}
        help = field.metadata["help"] + shown
        group.add_argument(flag, default=default, help=help, **reader)


def from_flags(options: type[Options], parsed: argparse.Namespace, **others: Any) -> Options:
    """Make the dataclass from parsed flags, and from `others` for its other fields."""
    made = dataclasses.fields(options)  # type: ignore[arg-type]  # a dataclass type, as all callers pass
    fields = (field.name for field in made if "help" in field.metadata)
    return options(**{name: getattr(parsed, name) for name in fields}, **others)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled most like `name`."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)[0]
