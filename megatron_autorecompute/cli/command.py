"""The base class of all commands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from typing import ClassVar


class Command(ABC):
    """One command of `megatron-autorecompute`: its flags, and what it does with them."""

    name: ClassVar[str]
    """The command's name."""
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
