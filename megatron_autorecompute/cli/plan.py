"""`megatron-autorecompute plan`: the fastest policy that fits a budget."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from rich.table import Table

from megatron_autorecompute.cli.arguments import add_json, add_output, add_verbose, budgets, sizes
from megatron_autorecompute.cli.estimate import budget_words, check_lengths, default_budget_bytes
from megatron_autorecompute.cli.output import console, output_file, print_plan, progress_bars
from megatron_autorecompute.cli.pipeline import MICRO_BATCH_SIZE
from megatron_autorecompute.cli.problem import Source, add_problem, problems, read_source
from megatron_autorecompute.cli.verify import add_runs, as_data, conclude, verified
from megatron_autorecompute.errors import InfeasibleError, OptionError
from megatron_autorecompute.planner.cost.lengths import varies
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.buckets import BucketPlan, bucket_plans
from megatron_autorecompute.planner.search.problem import Budget
from megatron_autorecompute.planner.search.shapes import search_shapes
from megatron_autorecompute.planner.suggestions import explained
from megatron_autorecompute.units import gib

if TYPE_CHECKING:
    from megatron_autorecompute.meta.verify import StageCheck

TAKES_MEGATRON_FLAGS = True
READS = ("profile", "job", "measured")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the problem, the budget, further searches, and the output file."""
    add_problem(parser)
    parser.add_argument(
        "--budget-gib",
        type=budgets,
        metavar="GIB[,GIB...]",
        help="GiB that torch may allocate on each device: one number for all stages, or one "
        "for each (default for a job: what its GPU has to spare)",
    )
    parser.add_argument(
        "--search-layout", action="store_true", help="also search how many layers a stage has"
    )
    parser.add_argument(
        "--search-micro-batch",
        type=sizes,
        default=(),
        metavar="B,B,...",
        help="also search the micro-batch size; give one --profile for each size",
    )
    add_output(parser, "PLAN.json", "file to write; - prints the plan")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also run Megatron's own schedule under the plan, as with the next two",
    )
    add_runs(parser)
    add_json(parser)
    add_verbose(parser)


def run(args: Namespace) -> None:
    """Solve; if nothing fits, raises InfeasibleError with changes that would make it fit."""
    output = output_file(args)
    verifies = args.verify or args.measured is not None or bool(args.lengths)
    source = read_source(args)
    if source.job is not None:
        check_lengths(output, source.job)
    budget = _budget(args, source)
    with progress_bars() as bars:
        plan = _solved(args, source, budget, bars)
    checks: Sequence[StageCheck] | None = None
    try:
        if output is not None:
            plan.save(output)
        if verifies and args.json:  # one JSON document has both
            checks = verified(args, plan)
    finally:
        beside: dict[str, Any] = {"verified": as_data(checks)} if checks else {}
        _print(args, plan, beside)
    if not args.json:
        _say_more(args, source, output)
    if verifies:
        conclude(args, verified(args, plan) if checks is None else checks)


def _print(args: Namespace, plan: Plan, beside: dict[str, Any]) -> None:
    """Print the plan; of a job whose microbatches differ in length, also the plans by length."""
    if not varies(plan.profile):
        print_plan(args, plan, beside)
        return
    buckets = bucket_plans(plan.problem())
    print_plan(args, plan, {**beside, "buckets": [asdict(one) for one in buckets]})
    if not args.json:
        console().print(_buckets_view(buckets))


def _budget(args: Namespace, source: Source) -> Budget:
    """Bytes on each device, as `--budget-gib` says, or what the GPU of a job has to spare.

    Raises OptionError for a profile without the flag.
    """
    if args.budget_gib is not None:
        budgets_of: tuple[int, ...] = args.budget_gib
        return budgets_of[0] if len(budgets_of) == 1 else budgets_of
    if source.job is None or source.gpu is None:
        raise OptionError(f"{source.names[0]} does not say the budget: add --budget-gib GIB.")
    said = gib(default_budget_bytes(source.gpu, None, source.job))
    return budgets(said)[0]  # so that the figure that is printed gives the same plan


def _say_more(args: Namespace, source: Source, output: Path | None) -> None:
    """Print where a job's budget and profile come from, and how its next plan needs no estimate."""
    if source.job is None or source.gpu is None:
        return
    if args.budget_gib is None:
        console().print(budget_words(source.gpu, None, source.job, "--budget-gib"))
    if source.recorded:
        console().print(
            "The profile came with this package; `estimate` makes it again from Megatron's code."
        )
    if output is not None:
        path = shlex.quote(str(output))
        print(f"Written to {path}, the profile with it. Plan again without an estimate:")
        print(f"megatron-autorecompute plan --profile {path} --budget-gib GIB")


def _solved(args: Namespace, source: Source, budget: Budget, bars: Progress) -> Plan:
    found, asked = problems(args, source, args.search_micro_batch)
    found = [own.at(budget) for own in found]
    problem, notes, flags = found[0], list(asked.notes), dict(asked.megatron_flags)
    if args.search_micro_batch or args.search_layout:
        bars.add_task("Micro-batch sizes" if args.search_micro_batch else "Layouts", total=None)
        searched = search_shapes(found, layouts=args.search_layout)
        problem, notes = searched.problem, [*notes, *searched.notes]
        if problem.layout != asked.layout:  # which the flags of before say
            flags = {name: flags[name] for name in (MICRO_BATCH_SIZE,) if name in flags}
        flags |= searched.megatron_flags
    bars.add_task("Stages, and Megatron's own settings", total=None)
    try:
        return make_plan(problem, megatron_flags=flags, notes=notes)
    except InfeasibleError as error:
        raise explained(error, problem) from error


def _buckets_view(plans: Sequence[BucketPlan]) -> Table:
    """The plans of a loop whose microbatches differ, a row for each length."""
    table = Table(title="By the largest microbatch of a call, tokens on a rank", box=None)
    for name in ("up to tokens", "of calls", "peak GiB", "step ms", "saves"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for plan in plans:
        fits = plan.policy is not None
        table.add_row(
            f"{plan.tokens:,}",
            "-" if plan.share is None else f"{plan.share:.0%}",
            gib(plan.peak_bytes),
            f"{plan.step_ms:,.0f}" if fits else "-",
            f"{plan.saved:.1%}" if fits else "-",
            plan.policy or "does not fit, even with the leanest choices",
        )
    return table
