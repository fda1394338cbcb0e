"""The problem that `plan` and `pareto` solve: flags for profiles, layout, schedule, choices."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_autorecompute.cli.pipeline import Asked, asked_pipeline, read_profile
from megatron_autorecompute.cli.values import percentile
from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.planner.search.micro_batches import same_samples
from megatron_autorecompute.planner.search.solve import Planner
from megatron_autorecompute.profile import IMBALANCE_PERCENTILE, Profile


def add_problem(parser: ArgumentParser) -> None:
    """Add the flags that `problems` reads; Megatron's settings have Megatron's names."""
    parser.add_argument("--profile", required=True, nargs="+", metavar="P.json")
    parser.add_argument(
        "--pp",
        type=int,
        help="pipeline stages (default: the profile's layout, or 1 if it knows none)",
    )
    parser.add_argument("--vp", type=int, metavar="V", help="chunks per stage")
    parser.add_argument(
        "--num-microbatches", type=int, metavar="M", help="default: the profile's, if it knows them"
    )
    parser.add_argument("--microbatch-group-size", type=int, metavar="N", help="default: pp")
    parser.add_argument("--overlap-moe-expert-parallel-comm", action="store_true")
    parser.add_argument("--num-layers-in-first-pipeline-stage", type=int, metavar="N")
    parser.add_argument("--num-layers-in-last-pipeline-stage", type=int, metavar="N")
    parser.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    parser.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    parser.add_argument(
        "--pipeline-model-parallel-layout", metavar="TEXT", help="as Et*3|(tt|)*6mL"
    )
    parser.add_argument(
        "--imbalance-percentile",
        type=percentile,
        metavar="P",
        help="plan layers with experts for this percentile of routing (default: "
        f"{IMBALANCE_PERCENTILE:g} if the profile states imbalance, else the records as they are, "
        "measured ones at their maximum)",
    )
    parser.add_argument(
        "--choices",
        choices=("all", "megatron"),
        default="all",
        help="all (default), or what Megatron's own checkpoints can run alone",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHOICE",
        help="use only this choice; repeatable; full/N stands for all groups",
    )


def problems(args: Namespace, micro_batches: Sequence[int] = ()) -> tuple[list[Planner], Asked]:
    """One planner per profile, all with as many samples per step as the first; the pipeline.

    Args:
        args: parsed flags of `add_problem`.
        micro_batches: micro-batch sizes, one for each profile; empty for a single profile.

    Raises ProfileError if profiles have other sizes or cannot be read, OptionError for an imbalance
    percentile without recorded imbalance or an open number of microbatches, PipelineError for a
    layout or schedule that Megatron refuses.
    """
    files = [read_profile(path) for path in args.profile]
    profiles = [profile for profile, _ in files]
    if args.choices == "megatron":
        profiles = [profile.as_megatron() for profile in profiles]
    if args.imbalance_percentile is not None:
        _check_imbalance(args, profiles)
    _, known = files[0]
    pipelines = [asked_pipeline(args, profile, known) for profile in profiles]
    found = [
        Planner(
            profile,
            pipeline.layout,
            same_samples(pipelines[0].schedule, profiles[0], profile),
            percentile=args.imbalance_percentile or "stated",
            allowed=args.only,
        )
        for profile, pipeline in zip(profiles, pipelines, strict=True)
    ]
    _check_micro_batches(profiles, micro_batches)
    return found, pipelines[0]


def _check_imbalance(args: Namespace, profiles: Sequence[Profile]) -> None:
    for path, profile in zip(args.profile, profiles, strict=True):
        if not any(kind.knows_imbalance for kind in profile.kinds):
            raise OptionError(
                f"--imbalance-percentile {args.imbalance_percentile:g}: {path} records no routing "
                "imbalance. Leave the flag out, or profile a model with experts."
            )


def _check_micro_batches(profiles: Sequence[Profile], asked: Sequence[int]) -> None:
    found = [profile.parallelism.micro_batch_size for profile in profiles]
    asked = asked or found[:1]
    if sorted(asked) != sorted(found):
        raise ProfileError(
            f"Asked for micro-batch sizes {sorted(asked)}, the given profiles are of {found}. "
            "Give --profile one file for each size that --search-micro-batch names."
        )
