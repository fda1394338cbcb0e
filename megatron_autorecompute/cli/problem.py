"""The problem that `plan` and `pareto` solve: flags for profiles, layout, schedule, choices."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_autorecompute.cli.values import percentile
from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.options import add_old_spelling
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.micro_batch_search import same_samples
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.profile import IMBALANCE_PERCENTILE, Profile


def add_problem(parser: ArgumentParser) -> None:
    """Add the flags that `planners` reads; Megatron's settings have Megatron's names."""
    parser.add_argument("--profile", required=True, nargs="+", metavar="P.json")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument("--vp", type=int, metavar="V", help="chunks per stage (default: 1)")
    parser.add_argument("--num-microbatches", type=int, required=True, metavar="M")
    parser.add_argument("--microbatch-group-size", type=int, metavar="N", help="default: pp")
    parser.add_argument("--overlap-moe-expert-parallel-comm", action="store_true")
    parser.add_argument("--num-layers-in-first-pipeline-stage", type=int, metavar="N")
    parser.add_argument("--num-layers-in-last-pipeline-stage", type=int, metavar="N")
    parser.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    parser.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    parser.add_argument(
        "--pipeline-model-parallel-layout", metavar="TEXT", help="as Et*3|(tt|)*6mL"
    )
    imbalance = parser.add_argument(
        "--imbalance-percentile",
        type=percentile,
        metavar="P",
        help="plan layers with experts for this percentile of routing (default: "
        f"{IMBALANCE_PERCENTILE:g} if the profile states imbalance, else the records as they are, "
        "measured ones at their maximum)",
    )
    add_old_spelling(parser, "--moe-percentile", imbalance)
    only = parser.add_argument(
        "--only",
        action="append",
        metavar="CHOICE",
        help="use only this choice; repeatable; full/N stands for all groups",
    )
    add_old_spelling(parser, "--allow", only)


def planners(args: Namespace, micro_batches: Sequence[int] = ()) -> list[Planner]:
    """One planner per profile, all with as many samples per step as the first.

    Args:
        args: parsed flags of `add_problem`.
        micro_batches: micro-batch sizes, one for each profile; empty for a single profile.

    Raises ProfileError if profiles have other sizes or cannot be read, OptionError for an imbalance
    percentile without recorded imbalance, PipelineError for a layout or schedule that Megatron
    refuses.
    """
    profiles = [Profile.load(path) for path in args.profile]
    if args.imbalance_percentile is not None:
        _check_imbalance(args, profiles)
    schedule = None
    found = []
    for profile in profiles:
        layout = _layout(args, profile)
        asked = Schedule.of_layout(
            layout,
            args.num_microbatches,
            microbatch_group_size=args.microbatch_group_size,
            overlap_moe_expert_parallel_comm=args.overlap_moe_expert_parallel_comm,
        )
        schedule = schedule or asked
        found.append(
            Planner(
                profile,
                layout,
                same_samples(schedule, profiles[0], profile),
                percentile=args.imbalance_percentile or "stated",
                allowed=args.only,
            )
        )
    _check_micro_batches(profiles, micro_batches)
    return found


def _check_imbalance(args: Namespace, profiles: Sequence[Profile]) -> None:
    for path, profile in zip(args.profile, profiles, strict=True):
        if not any(kind.knows_imbalance for kind in profile.kinds):
            raise OptionError(
                f"--imbalance-percentile {args.imbalance_percentile:g}: {path} records no routing "
                "imbalance. Leave the flag out, or profile a model with experts."
            )


def _layout(args: Namespace, profile: Profile) -> Layout:
    return Layout.from_flags(
        profile.model.num_layers,
        args.pp,
        args.vp,
        mtp_num_layers=profile.model.mtp_num_layers,
        num_layers_in_first_pipeline_stage=args.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=args.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
    )


def _check_micro_batches(profiles: Sequence[Profile], asked: Sequence[int]) -> None:
    found = [profile.parallelism.micro_batch_size for profile in profiles]
    asked = asked or found[:1]
    if sorted(asked) != sorted(found):
        raise ProfileError(
            f"Asked for micro-batch sizes {sorted(asked)}, the given profiles are of {found}. "
            "Give --profile one file for each size that --search-micro-batch names."
        )
