"""Command-line flags made from dataclass fields, which have their name, default and help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """Its errors are one line: what is wrong, and where all flags are listed."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.exit(2, f"{self.prog}: {message}. All flags: {self.prog} --help\n")


def option(default: Any, help: str, *, formerly: str | None = None) -> Any:
    """A dataclass field that is also a command-line flag with this help.

    Args:
        default: of the field and the flag.
        help: one sentence for people.
        formerly: an old name of the flag, which still works.
    """
    return dataclasses.field(default=default, metadata={"help": help, "formerly": formerly})


def add_flags(parser: argparse.ArgumentParser, options: type, defaults: Any = None) -> None:
    """Give the parser a flag for every field made with `option`, in one argument group.

    Args:
        parser: gets the group, titled with the first line of the dataclass's docstring.
        options: the dataclass.
        defaults: an instance whose values replace the fields' own defaults.
    """
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
        added = group.add_argument(flag, default=default, help=help, **reader)
        if field.metadata["formerly"]:
            add_old_spelling(group, field.metadata["formerly"], added)


class _OldSpelling(argparse.Action):
    """Does what the renamed flag does, and prints the new name on standard error."""

    def __init__(self, *, now: argparse.Action, **settings: Any) -> None:
        reader: Any = now.type
        super().__init__(nargs=now.nargs, type=reader, help=argparse.SUPPRESS, **settings)
        self._now = now
        self._said = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        old = option_string or self.option_strings[0]
        new = self._now.option_strings[self.option_strings.index(old)]
        if not self._said:  # a flag can be repeated
            say_renamed(old, new)
        self._said = True
        self._now(parser, namespace, values, new)


def add_old_spelling(parser: argparse._ActionsContainer, old: str, now: argparse.Action) -> None:
    """Accept `old`, a flag's old name, and print the new name on standard error.

    Args:
        parser: the parser, or argument group, that the flag was added to.
        old: such as `--allow`; `--help` does not show it.
        now: the flag, as `add_argument` returned it.
    """
    switched = isinstance(now, argparse.BooleanOptionalAction)
    names = [old, old.replace("--", "--no-", 1)] if switched else [old]
    parser.add_argument(
        *names, dest=now.dest, default=argparse.SUPPRESS, action=_OldSpelling, now=now
    )


def say_renamed(old: str, new: str) -> None:
    """Print the new name of something on standard error, in a job on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{old}: its name is {new} now; the old one still works.", file=sys.stderr)


def from_flags(options: type[Options], parsed: argparse.Namespace, **others: Any) -> Options:
    """Make the dataclass from parsed flags, and from `others` for its other fields."""
    made = dataclasses.fields(options)  # type: ignore[arg-type]  # a dataclass type, as all callers pass
    fields = (field.name for field in made if "help" in field.metadata)
    return options(**{name: getattr(parsed, name) for name in fields}, **others)
