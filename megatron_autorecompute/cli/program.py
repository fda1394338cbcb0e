"""The program `megatron-autorecompute`: a list of commands; only `main` prints errors.

Exit codes: 0 done, 2 wrong usage (argparse) or policy, otherwise the `exit_code` of the error's
class in `errors`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.compare import CompareCommand
from megatron_autorecompute.cli.estimate import EstimateCommand
from megatron_autorecompute.cli.explain import ExplainCommand
from megatron_autorecompute.cli.pareto import ParetoCommand
from megatron_autorecompute.cli.plan import PlanCommand
from megatron_autorecompute.cli.profile import ProfileCommand
from megatron_autorecompute.cli.report import ReportCommand
from megatron_autorecompute.cli.show import ShowCommand
from megatron_autorecompute.cli.trace import TraceCommand
from megatron_autorecompute.cli.verify import VerifyCommand
from megatron_autorecompute.errors import AutorecomputeError, MachineError
from megatron_autorecompute.packages import needed

PROGRAM = "megatron-autorecompute"
COMMANDS: tuple[Command, ...] = (
    EstimateCommand(),
    PlanCommand(),
    ShowCommand(),
    ExplainCommand(),
    ParetoCommand(),
    VerifyCommand(),
    ReportCommand(),
    TraceCommand(),
    CompareCommand(),
    ProfileCommand(),
)
"""In the order of `--help`."""


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
    except KeyboardInterrupt:
        streams.say(f"{name}: interrupted")
        return 130
    finally:
        streams.give_up()
    return 0


def _parsed(arguments: Sequence[str]) -> Namespace:
    words = list(arguments)
    if words[:1] == [CompareCommand.name]:
        return Namespace(command=CompareCommand(), flags=words[1:])
    cut = words.index("--") if "--" in words else len(words)
    reader = parser()
    args = reader.parse_args(words[:cut])
    args.megatron_flags = words[cut + 1 :]
    if args.megatron_flags and not args.command.takes_megatron_flags:
        reader.error(f"{' '.join(words[cut:])}: {args.command.name} takes nothing after --")
    return args


class _Parser(ArgumentParser):
    """Prints what was given on the command line without what a terminal would obey."""

    def error(self, message: str) -> NoReturn:
        super().error(streams.printable(message))


def parser() -> ArgumentParser:
    """All commands and their flags; `command` of what it parses is the Command."""
    top = _Parser(
        prog=PROGRAM,
        description="Per-layer activation recompute for Megatron-Core, measured and solved.",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for command in COMMANDS:
        listed: dict[str, Any] = {} if command.help is None else {"help": command.help}
        verb = verbs.add_parser(command.name, description=command.description, **listed)
        command.add_arguments(verb)
        verb.set_defaults(command=command)
    return top


def _run(args: Namespace) -> None:
    try:
        with needed(args.command.name):
            args.command.run(args)
        sys.stdout.flush()  # write errors show here, not when the interpreter ends
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MachineError(
            f"The operating system refused to read or write: {error}. Where output is redirected, "
            "give it a disk with room."
        ) from error
    except MemoryError as error:
        raise MachineError(
            "The memory of this machine is not enough for it. Ask for something smaller, or on "
            "another machine."
        ) from error
