"""The problem that `plan` and `pareto` solve: a profile or a job, layout, schedule, choices."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_autorecompute.cli.arguments import percentile
from megatron_autorecompute.cli.jobs import (
    SOURCES,
    add_gpu,
    add_job,
    carried,
    given_sources,
    named_gpu,
    read_job,
    recorded,
)
from megatron_autorecompute.cli.output import console, quiet_upstream
from megatron_autorecompute.cli.pipeline import (
    Asked,
    Known,
    asked_pipeline,
    known_of,
    read_profile,
)
from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.packages import needed
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shapes import same_samples
from megatron_autorecompute.planner.search.stage_problem import EARLY
from megatron_autorecompute.profile import IMBALANCE_PERCENTILE, Profile

_MEGATRONS = "Megatron's flag of that name"
_SWITCHES = (
    "--overlap-moe-expert-parallel-comm",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


@dataclass(frozen=True, slots=True)
class Source:
    """The profiles to plan, and what is known of their job."""

    profiles: Sequence[tuple[Profile, Known]]
    names: Sequence[str]
    """What messages call the profiles."""
    job: Job | None = None
    """The job whose profile it is, if the command line describes one."""
    gpu: Device | None = None
    """The GPU of that job."""
    recorded: bool = False
    """Whether the profile is one that this package carries."""


def read_source(args: Namespace) -> Source:
    """The profiles that `--profile` names, or that of the job that is described in their place.

    Raises OptionError for both or neither, ProfileError for a file that cannot be read, and what
    `read_job` and `profile_job` raise.
    """
    if args.profile is None:
        with quiet_upstream(), needed(f"Anything but {', '.join(carried())}"):
            return _of_job(args)
    options = (args.gpu, args.num_gpus, args.vocab_size, args.set or None)
    if given_sources(args) or any(option is not None for option in options):
        raise OptionError(
            f"--profile {args.profile[0]} gives the costs, and a job would give others ({SOURCES}; "
            "--gpu, --num-gpus, --vocab-size, --set). Leave one or the other out."
        )
    return Source([read_profile(path) for path in args.profile], args.profile)


def _of_job(args: Namespace) -> Source:
    if not given_sources(args):
        raise OptionError(f"Say what is planned: --profile P.json, or with --gpu NAME {SOURCES}.")
    gpu = named_gpu(args)
    job = read_job(args, gpu)
    profile = recorded(args, gpu)
    if profile is not None:
        return Source([(profile, known_of(profile))], [job.name], job, gpu, recorded=True)
    with console(stderr=True).status(f"{job.name}: starting") as status:
        from megatron_autorecompute.meta.profiling import profile_job  # loads torch and Megatron

        profile = profile_job(job, gpu, progress=status.update)
    return Source([(profile, known_of(profile))], [job.name], job, gpu)


def add_problem(parser: ArgumentParser) -> None:
    """Add the flags that `read_source` and `problems` read; settings have Megatron's names."""
    parser.add_argument(
        "--profile", nargs="+", metavar="P.json", help="files of estimate or profile, or a plan"
    )
    add_gpu(parser)
    add_job(parser)
    parser.add_argument(
        "--pp",
        type=int,
        help="number of pipeline stages (default: as in the profile, or 1 if it says none)",
    )
    parser.add_argument("--vp", type=int, metavar="V", help="chunks per stage")
    parser.add_argument(
        "--num-microbatches",
        type=int,
        metavar="M",
        help="microbatches of a step (default: as in the profile)",
    )
    parser.add_argument(
        "--microbatch-group-size",
        type=int,
        metavar="N",
        help=f"{_MEGATRONS} (default: the number of stages)",
    )
    for name in _SWITCHES:
        parser.add_argument(name, action="store_true", help=_MEGATRONS)
    for name in ("--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage"):
        parser.add_argument(name, type=int, metavar="N", help=_MEGATRONS)
    layout = f"{_MEGATRONS}, such as Et*3|(tt|)*6mL"
    parser.add_argument("--pipeline-model-parallel-layout", metavar="TEXT", help=layout)
    parser.add_argument(
        "--imbalance-percentile",
        type=percentile,
        metavar="P",
        help="plan layers with experts for this percentile of routing (default: "
        f"{IMBALANCE_PERCENTILE:g} if the profile states imbalance, else the records' own "
        "figures, which are the maximum where they were measured)",
    )
    parser.add_argument(
        "--choices",
        choices=("all", "megatron", EARLY),
        default="all",
        help="choices to use: all (default), only those of Megatron's own checkpoints, or all and "
        "recompute that begins while a stage waits for a gradient (+ahead)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHOICE",
        help="use this choice and no other; repeatable; full/N stands for all groups",
    )


def problems(
    args: Namespace, source: Source, micro_batches: Sequence[int] = ()
) -> tuple[list[Problem], Asked]:
    """One problem per profile, all with as many samples per step as the first; the pipeline.

    micro_batches: micro-batch sizes, one for each profile; empty for a single profile.

    Raises ProfileError if profiles have other sizes, OptionError for an imbalance percentile
    without recorded imbalance or an open number of microbatches, PipelineError for a layout or
    schedule that Megatron refuses.
    """
    profiles = [profile for profile, _ in source.profiles]
    if args.choices == "megatron":
        profiles = [profile.as_megatron() for profile in profiles]
    if args.imbalance_percentile is not None:
        _check_imbalance(args.imbalance_percentile, source.names, profiles)
    _, known = source.profiles[0]
    pipelines = [asked_pipeline(args, profile, known) for profile in profiles]
    found = [
        Problem(
            profile,
            pipeline.layout,
            same_samples(pipelines[0].schedule, profiles[0], profile),
            percentile=args.imbalance_percentile or "stated",
            allowed=[*(args.only or []), EARLY] if args.choices == EARLY else args.only,
        )
        for profile, pipeline in zip(profiles, pipelines, strict=True)
    ]
    _check_micro_batches(profiles, micro_batches)
    return found, pipelines[0]


def _check_imbalance(percentile: float, names: Sequence[str], profiles: Sequence[Profile]) -> None:
    for name, profile in zip(names, profiles, strict=True):
        if not any(kind.knows_imbalance for kind in profile.kinds):
            raise OptionError(
                f"--imbalance-percentile {percentile:g}: {name} records no routing imbalance. "
                "Leave the flag out, or profile a model with experts."
            )


def _check_micro_batches(profiles: Sequence[Profile], asked: Sequence[int]) -> None:
    found = [profile.parallelism.micro_batch_size for profile in profiles]
    asked = asked or found[:1]
    if sorted(asked) != sorted(found):
        raise ProfileError(
            f"Asked for micro-batch sizes {sorted(asked)}, the given profiles are of {found}. "
            "Give --profile one file for each size that --search-micro-batch names."
        )
