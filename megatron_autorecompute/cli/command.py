"""What every command of the command line is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from typing import ClassVar


class Command(ABC):
    """One verb of `megatron-autorecompute`: the flags it takes, and what it does with them."""

    name: ClassVar[str]
    """The verb."""
    help: ClassVar[str | None]
    """One line, for the list of commands; None: it is not listed."""
    description: ClassVar[str | None] = None
    """What `--help` of the command says above its flags."""
    takes_megatron_flags: ClassVar[bool] = False
    """Whether flags of pretrain_gpt.py may follow `--`; `run` finds them in `megatron_flags`."""

    @abstractmethod
    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the command's own flags to its parser."""

    @abstractmethod
    def run(self, args: Namespace) -> None:
        """Do it, and print the result; raises an AutorecomputeError, which ends the program."""
