"""The program `megatron-autorecompute`: a list of commands; only `main` prints errors.

A command is the module of its name in `cli`, imported when the command is named, so that `--help`
shows in no time. It has `add_arguments(parser)`, which adds its flags, and `run(args)`, which
prints the result; an AutorecomputeError ends the program. It may have
- DESCRIPTION: text of the command's `--help`, above its flags,
- TAKES_MEGATRON_FLAGS: whether flags of pretrain_gpt.py may follow `--`; `args.megatron_flags`,
- READS: names of the arguments that are files it reads; no output may replace one of them.

Exit codes: 0 done, 2 wrong usage (argparse) or policy, otherwise the `exit_code` of the error's
class in `errors`.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from megatron_autorecompute import __version__
from megatron_autorecompute.errors import AutorecomputeError, MachineError
from megatron_autorecompute.options import Parser
from megatron_autorecompute.packages import needed

PROGRAM = "megatron-autorecompute"
COMMANDS = {
    "example": "print an example's job description, to begin your own",
    "estimate": "compute the profile of a job without a device; times are modelled",
    "profile": "measure a job's layers on one device; only communication is modelled",
    "plan": "find the fastest policy that fits a budget, for a job or a profile",
    "show": "print a plan stage by stage, or a profile",
    "explain": "say what limits each stage",
    "pareto": "print the time of the step against the budget",
    "verify": "check a plan's peaks against Megatron's own schedule, without a device",
    "report": "write a plan as one HTML file that opens offline",
    "trace": "write a plan's step as a trace for Perfetto or chrome://tracing",
    "compare": "run Megatron's own strategies and ours on this machine, and print the table",
}
"""Every command and its line in `--help`, in that order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    for stream in _open_streams():
        with suppress(AttributeError):  # not a file's stream
            stream.reconfigure(errors="backslashreplace")
    name = PROGRAM
    try:
        args = _parsed(sys.argv[1:] if arguments is None else arguments)
        name = f"{PROGRAM} {args.verb}"
        _run(args)
    except AutorecomputeError as error:
        _say(f"{name}: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader has seen enough
        return 1
    except KeyboardInterrupt as interrupt:
        _say(": ".join(filter(None, (f"{name}: interrupted", str(interrupt)))))
        return 130
    finally:
        _give_up()
    return 0


def _open_streams() -> list[Any]:
    """Standard output and error, without those that are closed, as by >&-."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _give_up() -> None:
    """Forget what the streams cannot take: the interpreter flushes them once more at its end."""
    for stream in _open_streams():
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parsed(arguments: Sequence[str]) -> Namespace:
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    reader = parser(next((word for word in words[:cut] if word in COMMANDS), None))
    args, unknown = reader.parse_known_args(words[:cut])
    verb = vars(args).pop("parser")
    if unknown:
        verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.megatron_flags = words[cut + 1 :]
    if args.megatron_flags and not getattr(args.command, "TAKES_MEGATRON_FLAGS", False):
        reader.error(f"{' '.join(words[cut:])}: {args.verb} takes nothing after --")
    return args


def parser(name: str | None) -> ArgumentParser:
    """All commands, and the flags of one; `command` of what it parses is its module."""
    top = Parser(
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
        verb = verbs.add_parser(each, help=line, description=getattr(command, "DESCRIPTION", None))
        if getattr(command, "TAKES_MEGATRON_FLAGS", False):
            verb.description = "Arguments after -- are flags of pretrain_gpt.py."
        command.add_arguments(verb)
        verb.set_defaults(command=command, parser=verb)
    return top


def command_of(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"megatron_autorecompute.cli.{name}")


def _run(args: Namespace) -> None:
    try:
        with needed(args.verb):
            args.command.run(args)
        print(end="", flush=True)  # write errors show here, not when the interpreter ends
    except BrokenPipeError:
        raise
    except (OSError, MemoryError) as error:
        raise MachineError(
            f"This machine refused, {type(error).__name__}: {error}. Give a path that it can read "
            "or write, a disk with room, or something that needs less memory."
        ) from error
