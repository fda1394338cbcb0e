"""The program `megatron-autorecompute`: a list of commands; only `main` prints errors.

A command's module is imported when the command is named, so that `--help` shows in no time. Exit
codes: 0 done, 2 wrong usage (argparse) or policy, otherwise the `exit_code` of the error's class in
`errors`.
"""

from __future__ import annotations

import importlib
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

from megatron_autorecompute import __version__
from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.errors import AutorecomputeError, MachineError
from megatron_autorecompute.options import Parser, nearest
from megatron_autorecompute.packages import needed

PROGRAM = "megatron-autorecompute"
COMMANDS = {
    "example": "print an example's job description, to begin your own",
    "estimate": "compute the profile of a job without a device; times are modelled",
    "profile": "measure a job's layers on one device; only communication is modelled",
    "plan": "find the fastest policy that fits a budget, for a job or a profile",
    "show": "print a plan stage by stage, or a profile",
    "explain": "say what limits each stage, or what a layer's other choices cost",
    "pareto": "print the time of the step against the budget",
    "verify": "check a plan's peaks against Megatron's own schedule, without a device",
    "report": "write a plan as one HTML file that opens offline",
    "trace": "write a plan's step as a trace for Perfetto or chrome://tracing",
    "compare": "run Megatron's own strategies and ours on this machine, and print the table",
}
"""Every command and its line in `--help`, in that order. The command is the class `NameCommand` in
the module of its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    streams.prepare()
    name = PROGRAM
    try:
        args = _parsed(sys.argv[1:] if arguments is None else arguments)
        name = f"{PROGRAM} {args.command.name}"
        _run(args)
    except AutorecomputeError as error:
        streams.say(f"{name}: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader has seen enough
        return 1
    except KeyboardInterrupt as interrupt:
        streams.say(": ".join(filter(None, (f"{name}: interrupted", str(interrupt)))))
        return 130
    finally:
        streams.give_up()
    return 0


def _parsed(arguments: Sequence[str]) -> Namespace:
    words = list(arguments)
    if words[:1] == ["compare"]:  # which has a parser of its own
        return Namespace(command=command_of("compare"), flags=words[1:])
    cut = words.index("--") if "--" in words else len(words)
    reader = parser(next((word for word in words[:cut] if word in COMMANDS), None))
    args, unknown = reader.parse_known_args(words[:cut])
    verb = vars(args).pop("parser")
    if unknown:
        _refuse(verb, unknown)
    args.typed = words
    args.megatron_flags = words[cut + 1 :]
    if args.megatron_flags and not args.command.takes_megatron_flags:
        reader.error(f"{' '.join(words[cut:])}: {args.command.name} takes nothing after --")
    return args


def _refuse(parser: ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End with the arguments that no option takes, and the nearest flag."""
    said = f"unrecognized arguments: {' '.join(unknown)}"
    if unknown[0].startswith("--"):
        flags = re.findall(r"--[a-z-]+", parser.format_help())
        said += f"; the nearest flag is {nearest(unknown[0].partition('=')[0], flags)}"
    parser.error(said)


class _Parser(Parser):
    """Prints what was given on the command line without what a terminal would obey."""

    def error(self, message: str) -> NoReturn:
        super().error(streams.printable(message))


def parser(name: str | None) -> ArgumentParser:
    """All commands, and the flags of one; `command` of what it parses is the Command."""
    top = _Parser(
        prog=PROGRAM,
        description="Per-layer activation recompute for Megatron-Core, measured and solved.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for each, line in COMMANDS.items():
        if each != name:
            verbs.add_parser(each, help=line)
            continue
        command = command_of(each)
        verb = verbs.add_parser(each, help=line, description=command.description)
        command.add_arguments(verb)
        verb.set_defaults(command=command, parser=verb)
    return top


def command_of(name: str) -> Command:
    """A command by its name."""
    module = importlib.import_module(f"megatron_autorecompute.cli.{name}")
    command: Command = getattr(module, f"{name.capitalize()}Command")()
    return command


def _run(args: Namespace) -> None:
    try:
        with needed(args.command.name):
            args.command.run(args)
        sys.stdout.flush()  # write errors show here, not when the interpreter ends
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MachineError(
            f"The operating system refused to read or write: {error}. If output is redirected, "
            "redirect it to a disk with room."
        ) from error
    except MemoryError as error:
        raise MachineError(
            "This machine has too little memory for this command. Ask for something smaller, or "
            "use another machine."
        ) from error
