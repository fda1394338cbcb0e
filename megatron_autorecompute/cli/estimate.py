"""The verb `profile --no-device`: a job in, a profile and what it rests on out."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Device, Efficiency, device
from megatron_autorecompute.meta.job import Job, load_job
from megatron_autorecompute.meta.measured import with_measured
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report.terminal import gib
from megatron_autorecompute.units import GIB

RESERVE_GIB = 2.0
"""CUDA's context and NCCL's buffers, outside torch."""
RESERVE_SHARE = 0.05
"""Of the device's memory, for fragmentation of torch's allocator."""


def run(args: Namespace) -> None:
    """Make the profile, print it, and say how to go on.

    Raises OptionError for what cannot be meant.
    """
    job, gpu, efficiency = read_job(args), device(args.gpu), read_efficiency(args.efficiency)
    budget_bytes = default_budget_bytes(gpu, args.reserve_gib)
    if args.measured and args.sensitivity:
        raise OptionError(
            "--sensitivity moves the modelled shares, and --measured replaces what they give. "
            "Leave one of them out."
        )
    measured = Profile.load(args.measured) if args.measured else None
    console = Console(highlight=False, stderr=True)
    with console.status(f"{job.name}: starting") as status:
        from megatron_autorecompute.meta.profiling import profile_job
        from megatron_autorecompute.meta.sensitivity import sensitivity

        profile = profile_job(job, gpu, efficiency, status.update)
        if measured is not None:
            profile = with_measured(profile, measured)
        lines = []
        if args.sensitivity:
            lines = sensitivity(job, gpu, efficiency, budget_bytes, status.update)
    profile.save(args.output)
    view = profile_view(job, profile, args.reserve_gib)
    if args.json:
        print(profile.to_json().rstrip("\n"))
    else:
        Console(highlight=False).print(Group(view, *map(Text, lines)))
        # Not through rich: a wrapped command cannot be pasted.
        print(f"Written to {args.output}. Next:\n{plan_command(job, args.output, budget_bytes)}")


def read_job(args: Namespace) -> Job:
    """The job from a YAML file, a recipe, or Megatron's own flags: exactly one of them."""
    given = [args.job is not None, args.recipe is not None, bool(args.megatron_flags)]
    if sum(given) != 1:
        raise OptionError(
            f"Asked for {sum(given)} job descriptions; give exactly one of JOB.yaml, "
            "--recipe NAME, or -- and the flags of pretrain_gpt.py."
        )
    if args.job is not None:
        return load_job(args.job)
    if args.recipe is not None:
        from megatron_autorecompute.meta.recipe import job_from_recipe

        return job_from_recipe(args.recipe, args.num_gpus)
    if args.num_gpus is None:
        raise OptionError("Flags of pretrain_gpt.py do not say how many GPUs: add --num-gpus N.")
    from megatron_autorecompute.meta.flags import job_from_flags

    return job_from_flags(args.megatron_flags, args.num_gpus)


def read_efficiency(text: str | None) -> Efficiency:
    """`gemm=0.6,bandwidth=0.8` over the defaults; raises OptionError for anything else."""
    known = [field.name for field in fields(Efficiency)]
    shares: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            shares[name] = float(value)
        except ValueError:
            shares[name] = 0.0
        if name not in known or not 0 < shares[name] <= 1:
            raise OptionError(
                f"Cannot read {part!r} in --efficiency: write NAME=SHARE with a share over 0 and "
                f"at most 1; names are {', '.join(known)}."
            )
    return Efficiency(**shares)


def reserve_bytes(gpu: Device, reserve_gib: float | None) -> int:
    """What is kept back of a device's memory."""
    if reserve_gib is not None:
        return round(reserve_gib * GIB)
    return round(RESERVE_GIB * GIB + RESERVE_SHARE * gpu.memory_bytes)


def default_budget_bytes(gpu: Device, reserve_gib: float | None) -> int:
    """What torch may allocate; raises OptionError where the reserve leaves nothing."""
    budget = gpu.memory_bytes - reserve_bytes(gpu, reserve_gib)
    if budget <= 0:
        raise OptionError(
            f"--reserve-gib {reserve_gib} leaves nothing of {gpu.name}'s {gib(gpu.memory_bytes)} "
            "GiB. Give less."
        )
    return budget


def plan_command(job: Job, path: Path, budget_bytes: int) -> str:
    """The command that plans this job on its own layout."""
    words = [f"megatron-autorecompute plan --profile {path} --budget-gib {gib(budget_bytes)}"]
    words.append(f"--pp {job.size('pipeline')} --num-microbatches {job.num_microbatches}")
    for flag, name in (
        ("--vp", "virtual_pipeline_model_parallel_size"),
        ("--microbatch-group-size", "microbatch_group_size_per_vp_stage"),
        ("--num-layers-in-first-pipeline-stage", "num_layers_in_first_pipeline_stage"),
        ("--num-layers-in-last-pipeline-stage", "num_layers_in_last_pipeline_stage"),
        ("--pipeline-model-parallel-layout", "pipeline_model_parallel_layout"),
    ):
        if job.config.get(name):
            words.append(f"{flag} {_quoted(job.config[name])}")
    for name in (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "overlap_moe_expert_parallel_comm",
    ):
        if job.config.get(name):
            words.append("--" + name.replace("_", "-"))
    return " ".join(words)


def _quoted(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)


def profile_view(job: Job, profile: Profile, reserve_gib: float | None) -> Group:
    """Records, static bytes and assumptions."""
    modelled = "modelled, not measured"
    if profile.model.facts.get("measured"):
        modelled = "measured where said, else modelled"
    title = f"{job.name}: {profile.num_layers} layers on {job.num_gpus} GPUs; {modelled}"
    kept = (
        f"{reserve_gib:g} GiB as asked"
        if reserve_gib is not None
        else f"{RESERVE_GIB:g} GiB outside torch and {RESERVE_SHARE:.0%} for fragmentation "
        "(assumed; --reserve-gib)"
    )
    return Group(
        Text(title, style="bold"),
        _records(profile),
        _static(profile),
        Text("Assumed:"),
        *(Text(f"- {sentence}") for sentence in profile.assumptions),
        Text(f"- Budget: the device's memory less {kept}."),
    )


def _records(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layers", "choice", "held MiB", "fwd +MiB", "bwd +MiB", "fwd ms", "bwd ms"):
        table.add_column(name, justify="left" if name in ("layers", "choice") else "right")
    named = [(f"{len(k.layers)} {k.name}", r) for k in profile.kinds for r in k.choices]
    norm = [("final norm", profile.final_norm)] if profile.final_norm else []
    for name, record in [("embedding", profile.embedding), *named, *norm, ("head", profile.head)]:
        sizes = (
            record.held_bytes,
            record.forward_transient_bytes,
            record.backward_transient_bytes,
        )
        table.add_row(
            name,
            Text(record.choice),  # its brackets are no markup
            *(f"{size / 2**20:.0f}" for size in sizes),
            f"{record.forward_ms:.2f}",
            f"{record.backward_ms:.2f}",
        )
    return table


def _static(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "weights GiB", "gradients", "optimizer", "buffers", "static"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(profile.stages):
        static = stage.static
        parts = (
            static.parameter_bytes,
            static.gradient_bytes,
            static.optimizer_state_bytes,
            static.buffer_bytes,
            static.total_bytes,
        )
        table.add_row(str(number), *map(gib, parts))
    return table
