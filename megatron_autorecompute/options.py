"""Command-line flags from dataclass fields: name, default and help are written once, there."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any, TypeVar

Options = TypeVar("Options")


def option(default: Any, help: str) -> Any:
    """A dataclass field that is also a command-line flag with this help."""
    return dataclasses.field(default=default, metadata={"help": help})


def add_flags(parser: argparse.ArgumentParser, options: type, defaults: Any = None) -> None:
    """Give the parser a flag for every field made with `option`, in a group of its own."""
    group = parser.add_argument_group((options.__doc__ or "").splitlines()[0].rstrip("."))
    types = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if "help" not in field.metadata:
            continue
        default = field.default if defaults is None else getattr(defaults, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        shown = "" if default is None else f" (default: {default})"
        if types[field.name] is bool:
            kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            given = [t for t in typing.get_args(types[field.name]) if t is not type(None)]
            kind = {"type": given[0] if given else types[field.name]}
        group.add_argument(flag, default=default, help=field.metadata["help"] + shown, **kind)


def from_flags(options: type[Options], parsed: argparse.Namespace, **others: Any) -> Options:
    """The dataclass with what was given on the command line, and `others` for the other fields."""
    made = dataclasses.fields(options)  # type: ignore[arg-type]  # a dataclass type, as all callers pass
    fields = (field.name for field in made if "help" in field.metadata)
    return options(**{name: getattr(parsed, name) for name in fields}, **others)
