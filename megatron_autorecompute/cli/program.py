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
    "example": ("jobs", "print an example's job description, to begin your own"),
    "estimate": ("estimate", "compute the profile of a job without a device; times are modelled"),
    "profile": ("estimate", "measure a job's layers on one device; only communication is modelled"),
    "plan": ("plan", "find the fastest policy that fits a budget, for a job or a profile"),
    "show": ("show", "print a plan stage by stage, or a profile"),
    "explain": ("show", "say what limits each stage"),
    "pareto": ("pareto", "print the time of the step against the budget"),
    "verify": ("verify", "check a plan's peaks against Megatron's own schedule, without a device"),
    "report": ("show", "write a plan as one HTML file that opens offline"),
    "trace": ("show", "write a plan's step as a trace for Perfetto or chrome://tracing"),
    "compare": (
        "compare",
        "run Megatron's own strategies and ours on this machine, and print the table",
    ),
}
"""Every command, its module and its line in `--help`, in that order. The command is the class
`NameCommand`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    streams.prepare()
    name = PROGRAM
    try:
        args = _parsed(sys.argv[1:] if arguments is None else arguments)
        name = f"{PROGRAM} {args.verb}"
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
        return Namespace(verb="compare", command=command_of("compare"), flags=words[1:])
    cut = words.index("--") if "--" in words else len(words)
    reader = parser(next((word for word in words[:cut] if word in COMMANDS), None))
    args, unknown = reader.parse_known_args(words[:cut])
    verb = vars(args).pop("parser")
    if unknown:
        _refuse(verb, unknown)
    args.typed = words
    args.megatron_flags = words[cut + 1 :]
    if args.megatron_flags and not args.command.takes_megatron_flags:
        reader.error(f"{' '.join(words[cut:])}: {args.verb} takes nothing after --")
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
    for each, (_, line) in COMMANDS.items():
        if each != name:
            verbs.add_parser(each, help=line)
            continue
        command = command_of(each)
        verb = verbs.add_parser(each, help=line, description=command.description)
        if command.takes_megatron_flags:
            verb.description = "Arguments after -- are flags of pretrain_gpt.py."
        command.add_arguments(verb)
        verb.set_defaults(command=command, parser=verb)
    return top


def command_of(name: str) -> Command:
    """A command by its name."""
    module = importlib.import_module(f"megatron_autorecompute.cli.{COMMANDS[name][0]}")
    command: Command = getattr(module, f"{name.capitalize()}Command")()
    return command


def _run(args: Namespace) -> None:
    try:
        with needed(args.verb):
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
