"""`megatron-autorecompute profile`: makes a profile of a job of any size, on one device."""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.estimate import (
    add_options,
    budget_words,
    checked_output,
    default_budget_bytes,
    read_efficiency,
    show_profile,
)
from megatron_autorecompute.cli.jobs import add_gpu, read_job
from megatron_autorecompute.cli.output import console, quiet_upstream, without_effect
from megatron_autorecompute.cli.values import at_least
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Device, device
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.one_device import LEAST, MOST

if TYPE_CHECKING:
    import torch


class ProfileCommand(Command):
    """Measures a job's layers on one device."""

    name = "profile"
    description = "Arguments after -- are flags of pretrain_gpt.py."
    takes_megatron_flags = True
    reads = ("job", "measured")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the device that measures, and the job with the flags of `estimate`."""
        parser.add_argument(
            "--device", required=True, choices=("cuda", "cpu"), help="what runs the layers"
        )
        add_gpu(parser, " (default: the one that measures)")
        parser.add_argument(
            "--repeats",
            type=at_least(2),
            metavar="N",
            help="how often each choice is timed, at least (default: "
            f"{MOST}, and down to {LEAST} where a layer has many choices)",
        )
        add_options(parser)

    def run(self, args: Namespace) -> None:
        """Make the profile, print it, and print the next command.

        Raises OptionError for contradictory or impossible options, MachineError if the device or
        what runs on it is not there.
        """
        with quiet_upstream():
            _profile(args)


def _profile(args: Namespace) -> None:
    options = ("--measured", "--sensitivity", "--offload")
    for option in options:
        if getattr(args, option.removeprefix("--")):
            raise without_effect(option, "--device", "the layers' times are measured")
    output, named = checked_output(args), _named_gpu(args)
    import torch  # estimate needs it, and Megatron, only later

    from megatron_autorecompute.one_device.build import device_of
    from megatron_autorecompute.one_device.profiling import profile_on_device

    where = device_of(args.device)
    gpu = named or device(torch.cuda.get_device_name(where))
    job = _job(args, where)
    efficiency = read_efficiency(args.efficiency, gpu)
    budget_bytes = default_budget_bytes(gpu, args.reserve_gib, job)
    with console(stderr=True).status(streams.printable(f"{job.name}: starting")) as status:
        profile = profile_on_device(job, where, gpu, efficiency, args.repeats, status.update)
    budget = budget_words(gpu, args.reserve_gib, job)
    show_profile(args, profile, output, budget_bytes, [budget])


def _named_gpu(args: Namespace) -> Device | None:
    """The job's GPU; None: the one that measures."""
    if args.gpu is not None:
        return device(args.gpu)
    if args.device == "cpu":
        raise OptionError(
            "--device cpu does not say what the job runs on: add --gpu NAME, such as h100-80gb, "
            "for its links and memory."
        )
    return None


def _job(args: Namespace, where: torch.device) -> Job:
    if where.type == "cuda" and args.megatron_flags:
        # Megatron's own parser runs in a process that sees no CUDA, as in estimate.
        from megatron_autorecompute.meta.meta_step import in_processes

        asked = Namespace(**{n: v for n, v in vars(args).items() if n != "command"})
        [job] = in_processes(functools.partial(_read, asked), [0])
        return job
    return read_job(args)


def _read(args: Namespace, _: int) -> Job:
    return read_job(args)
