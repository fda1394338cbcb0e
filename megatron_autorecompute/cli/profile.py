"""`megatron-autorecompute profile`: measures a job's layers on one device."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.arguments import at_least
from megatron_autorecompute.cli.estimate import (
    add_options,
    budget_words,
    default_budget_bytes,
    read_efficiency,
    show_profile,
)
from megatron_autorecompute.cli.jobs import add_gpu, named_gpu, read_job
from megatron_autorecompute.cli.output import console, output_file, quiet_upstream
from megatron_autorecompute.meta.devices import device

TAKES_MEGATRON_FLAGS = True
READS = ("job",)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the device that measures, and the job with the flags of `estimate`."""
    parser.add_argument(
        "--device", required=True, choices=("cuda", "cpu"), help="what runs the layers"
    )
    add_gpu(parser, " (default: the one that measures)")
    parser.add_argument(
        "--repeats",
        type=at_least(2),
        metavar="N",
        help="how often each choice is timed, at least (default: 12 or fewer, by the choices)",
    )
    add_options(parser)


@quiet_upstream()
def run(args: Namespace) -> None:
    """Make the profile, print it, and print the next command.

    Raises OptionError for contradictory or impossible options, MachineError if the device or
    what runs on it is not there.
    """
    output = output_file(args)
    named = None if args.device == "cuda" and args.gpu is None else named_gpu(args)
    import torch  # estimate needs it, and Megatron, only later

    from megatron_autorecompute.one_device.build import device_of
    from megatron_autorecompute.one_device.profiling import profile_on_device

    where = device_of(args.device)
    gpu = named or device(torch.cuda.get_device_name(where))
    job = read_job(args)
    efficiency = read_efficiency(args.efficiency, gpu)
    budget_bytes = default_budget_bytes(gpu, args.reserve_gib, job)
    with console(stderr=True).status(f"{job.name}: starting") as status:
        profile = profile_on_device(job, where, gpu, efficiency, args.repeats, status.update)
    budget = budget_words(gpu, args.reserve_gib, job)
    show_profile(args, profile, output, budget_bytes, [budget])
