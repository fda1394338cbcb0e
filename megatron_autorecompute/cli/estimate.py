"""`megatron-autorecompute estimate`: a job's profile without a device."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group
from rich.text import Text

from megatron_autorecompute import json_records
from megatron_autorecompute.cli.arguments import add_json, add_output, add_verbose, number_of_gib
from megatron_autorecompute.cli.jobs import add_gpu, add_job, named_gpu, read_job
from megatron_autorecompute.cli.output import console, output_file, print_result, quiet_upstream
from megatron_autorecompute.cli.profile_view import profile_view
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import SHARES, Device, Efficiency
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.measured_records import measured_kinds, with_measured
from megatron_autorecompute.meta.static_bytes import outside_torch
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import GIB, gib

RESERVE_SHARE = 0.05
"""Assumed share of the device's memory for fragmentation of torch's allocator."""

TAKES_MEGATRON_FLAGS = True
READS = ("job", "measured")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the job, the device, and how the times are modelled."""
    add_gpu(parser)
    add_options(parser)
    parser.add_argument(
        "--offload",
        action="append",
        default=[],
        metavar="MODULE+...",
        help="also record choices that offload these modules; cpu_offloading stands for whole "
        "layers (docs/offload.md); repeatable",
    )
    parser.add_argument(
        "--measured", metavar="P.json", help="profile measured in a job: use its records"
    )


@quiet_upstream()
def run(args: Namespace) -> None:
    """Make the profile, print it, and print the next command.

    Raises OptionError for contradictory or impossible options.
    """
    output = output_file(args)
    gpu = named_gpu(args)
    job = read_job(args, gpu)
    check_lengths(output, job)
    efficiency = read_efficiency(args.efficiency, gpu)
    budget_bytes = default_budget_bytes(gpu, args.reserve_gib, job)
    offload = [LayerPolicy.parse(f"none+offload[{modules}]").offload for modules in args.offload]
    measured = Profile.load(args.measured) if args.measured else None
    if measured is not None:
        measured_kinds(measured)  # refused before the work
    with console(stderr=True).status(f"{job.name}: starting") as status:
        # Loads torch and Megatron, which only this needs.
        from megatron_autorecompute.meta.profiling import profile_job

        profile = profile_job(job, gpu, efficiency, status.update, offload=offload)
        if measured is not None:
            profile = with_measured(profile, measured)
    step_end = (
        f"A step also takes {profile.step_end_ms:,.0f} ms outside its microbatches, for the "
        "optimizer and for data-parallel collectives that nothing hides (modelled for "
        f"{gpu.name}). The steps of plans leave this out."
    )
    budget = budget_words(gpu, args.reserve_gib, job)
    show_profile(args, profile, output, budget_bytes, [step_end, budget])


def add_options(parser: ArgumentParser) -> None:
    """Add where the job is read from, and what the profile is made and printed with."""
    add_job(parser)
    parser.add_argument(
        "--reserve-gib",
        type=number_of_gib,
        metavar="GIB",
        help="GiB of the device to keep free (default: 5%% of it, and 2 or more outside torch)",
    )
    parser.add_argument(
        "--efficiency",
        metavar="NAME=SHARE,...",
        help="shares of the device's peaks to assume; host=FACTOR slows the host",
    )
    add_output(parser, "P.json", "file to write; - prints the profile")
    add_json(parser)
    add_verbose(parser)


def show_profile(
    args: Namespace, profile: Profile, output: Path | None, budget_bytes: int, lines: Sequence[str]
) -> None:
    """Save a job's profile, print it, and print the next command; `lines` are printed below it."""
    gpus = profile.model.facts["num_gpus"]
    view = Group(profile_view(profile, args.verbose, f" on {gpus} GPUs"), *map(Text, lines))
    try:
        if output is not None:
            profile.save(output)
    finally:
        print_result(args, profile.to_json(), view)
    if output is not None and not args.json:
        # Not through rich: a wrapped command cannot be pasted.
        print(f"Written to {output}. Next:\n{plan_command(output, budget_bytes)}")


def budget_words(
    gpu: Device, reserve_gib: float | None, job: Job, option: str = "--reserve-gib"
) -> str:
    """The budget that is proposed, why, and the option that changes it."""
    budget = gib(default_budget_bytes(gpu, reserve_gib, job))
    outside_bytes, reason = outside_torch(job, gpu)
    kept = (
        f"{outside_bytes / GIB:.3g} GiB outside torch ({reason}) and "
        f"{RESERVE_SHARE:.0%} for fragmentation (assumed; {option})"
        if reserve_gib is None
        else f"{reserve_gib:g} GiB as asked"
    )
    return f"Budget {budget} GiB: the device's memory less {kept}."


def check_lengths(output: Path | None, job: Job) -> None:
    """Raise OptionError if the output is the file of the job's sample lengths."""
    if output is not None and isinstance(job.sample_lengths, str):
        json_records.check_writable(output, [job.sample_lengths])


HOST, SLOWEST_HOST = "host", 100
"""A factor of `--efficiency`, and the most that it may be."""


def read_efficiency(text: str | None, gpu: Device) -> Efficiency:
    """`gemm=0.6,bandwidth=0.8,host=1.6` over the device's own, host times its host's; raises
    OptionError for anything else."""
    given: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = 0.0
        most = SLOWEST_HOST if name == HOST else 1
        if name not in (*SHARES, HOST) or not 0 < given[name] <= most:
            raise OptionError(
                f"Cannot read {part!r} in --efficiency: write NAME=SHARE with a share over 0 and "
                f"at most 1; names are {', '.join(SHARES)}. Or {HOST}=FACTOR: how many times as "
                f"long the host takes, at most {SLOWEST_HOST}, such as 1.6 at AWS."
            )
    host = given.pop(HOST, 1.0)
    return replace(gpu.reaches, **given).with_host(host)


def default_budget_bytes(gpu: Device, reserve_gib: float | None, job: Job) -> int:
    """Bytes that torch may allocate; raises OptionError if the reserve leaves nothing."""
    assumed_bytes = outside_torch(job, gpu)[0] + RESERVE_SHARE * gpu.memory_bytes
    budget = gpu.memory_bytes - round(assumed_bytes if reserve_gib is None else reserve_gib * GIB)
    if budget <= 0:
        raise OptionError(
            f"--reserve-gib {reserve_gib} leaves nothing of {gpu.name}'s {gib(gpu.memory_bytes)} "
            "GiB. Give less."
        )
    return budget


def plan_command(path: Path, budget_bytes: int) -> str:
    """The `plan` command for the job's own pipeline, which the profile knows."""
    return (
        f"megatron-autorecompute plan --profile {shlex.quote(str(path))} "
        f"--budget-gib {gib(budget_bytes)} -o plan.json"
    )
