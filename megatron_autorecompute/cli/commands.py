"""The command `megatron-autorecompute`: one function per verb; only `main` prints errors.

Exit codes: 0 done, 2 wrong usage (argparse) or policy, otherwise the `exit_code` of the error's
class in `errors`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.text import Text

from megatron_autorecompute.cli.report import add_report
from megatron_autorecompute.errors import (
    AutorecomputeError,
    InfeasibleError,
    MachineError,
    OptionError,
    ProfileError,
)
from megatron_autorecompute.packages import needed
from megatron_autorecompute.patched import patched_environ
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.layout_search import search_layout
from megatron_autorecompute.planner.megatron_strategies import launch_lines
from megatron_autorecompute.planner.micro_batch_search import same_samples, search_micro_batch
from megatron_autorecompute.planner.plan import Plan, curve_point, make_plan
from megatron_autorecompute.planner.planner import Planner, neighbours
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.suggestions import explained
from megatron_autorecompute.profile import IMBALANCE_PERCENTILE, Profile
from megatron_autorecompute.report import terminal
from megatron_autorecompute.units import GIB, MOST_GIB

MOST_POINTS = 1 << 12
"""Of a curve: more than anybody can tell apart."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    reader = parser()
    parsed = reader.parse_args(words[:cut])
    parsed.megatron_flags = words[cut + 1 :]
    if parsed.megatron_flags and parsed.verb != "profile":
        reader.error(f"{' '.join(words[cut:])}: {parsed.verb} takes nothing after --")
    try:
        return _run(parsed)
    except AutorecomputeError as error:
        print(f"megatron-autorecompute {parsed.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"megatron-autorecompute {parsed.verb}: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        with needed(args.verb):
            args.run(args)
        sys.stdout.flush()  # what cannot be written shows here, not when the interpreter ends
    except OSError as error:
        # The interpreter flushes standard output once more at its end; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1
        raise MachineError(
            f"The operating system refused to read or write: {error}. Where output is redirected, "
            "give it a disk with room."
        ) from error
    return 0


def parser() -> argparse.ArgumentParser:
    """All verbs and their flags."""
    top = argparse.ArgumentParser(
        prog="megatron-autorecompute",
        description="Per-layer activation recompute for Megatron-Core, measured and solved.",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for add in VERBS:
        add(verbs)
    return top


Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_plan(verbs: Verbs) -> None:
    verb = verbs.add_parser("plan", help="solve a profile for a budget")
    _add_problem(verb)
    verb.add_argument(
        "--budget-gib",
        required=True,
        type=_budgets,
        metavar="GIB[,GIB...]",
        help="what torch may allocate on each device, one for all stages or one each",
    )
    verb.add_argument(
        "--search-layout", action="store_true", help="also search the layers per stage"
    )
    verb.add_argument(
        "--search-micro-batch",
        type=_sizes,
        default=(),
        metavar="B,B,...",
        help="also search the micro-batch size; give one --profile for each",
    )
    verb.add_argument(
        "--curve-points",
        type=_at_least(0, MOST_POINTS),
        default=0,
        metavar="N",
        help="put the curve of time against budget into the plan, for stepping down",
    )
    verb.add_argument("-o", "--output", type=_file, metavar="PLAN.json", help="write the plan")
    verb.add_argument(
        "--verify", action="store_true", help="run Megatron's own schedule under the plan"
    )
    _add_json(verb)
    verb.set_defaults(run=_plan)


def _add_verify(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "verify",
        help="check a plan's peaks against Megatron's own schedule, without a device",
        description="Ends with 10 where a stage exceeds its budget or differs by more than 0.5%%.",
    )
    verb.add_argument("plan", metavar="PLAN.json")
    _add_json(verb)
    verb.set_defaults(run=lambda args: _verify(args, Plan.load(args.plan)))


def _add_show(verbs: Verbs) -> None:
    verb = verbs.add_parser("show", help="print a plan, stage by stage")
    verb.add_argument("plan", metavar="PLAN.json")
    _add_json(verb)
    verb.set_defaults(run=_show)


def _add_explain(verbs: Verbs) -> None:
    verb = verbs.add_parser("explain", help="why a plan chose what it chose")
    verb.add_argument("plan", metavar="PLAN.json")
    verb.add_argument("--layer", type=int, metavar="I", help="0-based: what else it could have")
    _add_json(verb)
    verb.set_defaults(run=_explain)


def _add_pareto(verbs: Verbs) -> None:
    verb = verbs.add_parser("pareto", help="time of the step against the budget")
    _add_problem(verb)
    verb.add_argument(
        "--points",
        type=_at_least(1, MOST_POINTS),
        default=64,
        metavar="N",
        help="budgets (default: 64)",
    )
    _add_json(verb)
    verb.set_defaults(run=_pareto)


def _add_profile(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "profile",
        help="profile a job without a device",
        description="Everything after -- is read as flags of pretrain_gpt.py.",
    )
    verb.add_argument("--no-device", action="store_true", required=True, help="modelled figures")
    verb.add_argument("--gpu", required=True, metavar="NAME", help="such as h100-80gb")
    verb.add_argument("job", nargs="?", metavar="JOB.yaml", help="see docs/no-device.md")
    verb.add_argument("--recipe", metavar="NAME", help="a recipe function of Megatron Bridge")
    verb.add_argument(
        "--num-gpus", type=_at_least(1), metavar="N", help="world size, with flags or a recipe"
    )
    verb.add_argument(
        "--reserve-gib", type=_gib, metavar="GIB", help="kept back (default: 2 and 5%% of all)"
    )
    verb.add_argument("--efficiency", metavar="NAME=SHARE,...", help="shares of the peaks")
    verb.add_argument("--measured", metavar="P.json", help="records measured of the same layers")
    verb.add_argument("--sensitivity", action="store_true", help="plan with each share moved 20%%")
    verb.add_argument("-o", "--output", type=_file, default=Path("profile.json"), metavar="P.json")
    _add_json(verb)
    verb.set_defaults(run=_profile)


def _profile(args: argparse.Namespace) -> None:
    with _quiet_upstream():
        _module("cli.estimate").run(args)


def _module(module: str) -> ModuleType:
    # Not an import statement: the type checker of the planner half would follow it into torch.
    return importlib.import_module(f"megatron_autorecompute.{module}")


VERBS = (_add_profile, _add_plan, _add_show, _add_explain, _add_pareto, _add_verify, add_report)


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_problem(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--profile", required=True, nargs="+", metavar="P.json")
    verb.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    verb.add_argument("--vp", type=int, metavar="V", help="chunks per stage (default: 1)")
    verb.add_argument("--num-microbatches", type=int, required=True, metavar="M")
    verb.add_argument("--microbatch-group-size", type=int, metavar="N", help="default: pp")
    verb.add_argument("--overlap-moe-expert-parallel-comm", action="store_true")
    verb.add_argument("--num-layers-in-first-pipeline-stage", type=int, metavar="N")
    verb.add_argument("--num-layers-in-last-pipeline-stage", type=int, metavar="N")
    verb.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    verb.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    verb.add_argument("--pipeline-model-parallel-layout", metavar="TEXT", help="as Et*3|(tt|)*6mL")
    verb.add_argument(
        "--imbalance-percentile",
        "--moe-percentile",  # its name before
        type=_percentile,
        metavar="P",
        help="plan layers with experts for this percentile of routing (default: "
        f"{IMBALANCE_PERCENTILE:g} where the profile states imbalance, else its records as they "
        "are, of measured ones the most that was seen)",
    )
    verb.add_argument(
        "--allow",
        action="append",
        metavar="CHOICE",
        help="use only this choice; repeatable; full/N stands for all groups",
    )


def _budgets(text: str) -> tuple[int, ...]:
    values = tuple(_gib(part) for part in text.split(","))
    if 0 in values:
        raise argparse.ArgumentTypeError(f"{text!r}: a budget is more than 0 GiB")
    return tuple(round(value * GIB) for value in values)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_at_least(1)(part) for part in text.split(","))


def _gib(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB as a number from 0 to {MOST_GIB}")
    return value


def _percentile(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: a percentile is above 0 and at most 100")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # within no range


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limit = "or more" if most is None else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, {least} {limit}")
        return value

    return read


def _file(text: str) -> Path:
    if not Path(text).name or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file name")
    return Path(text)


def _planners(args: argparse.Namespace) -> list[Planner]:
    """One planner per profile, all with as many samples per step as the first."""
    profiles = [Profile.load(path) for path in args.profile]
    if args.imbalance_percentile is not None:
        _check_imbalance(args, profiles)
    schedule = None
    planners = []
    for profile in profiles:
        layout = _layout(args, profile)
        asked = Schedule(
            layout.num_stages,
            layout.num_chunks,
            args.num_microbatches,
            args.microbatch_group_size,
            args.overlap_moe_expert_parallel_comm,
        )
        schedule = schedule or asked
        planners.append(
            Planner(
                profile,
                layout,
                same_samples(schedule, profiles[0], profile),
                percentile=args.imbalance_percentile or "stated",
                allowed=args.allow,
            )
        )
    return planners


def _check_imbalance(args: argparse.Namespace, profiles: Sequence[Profile]) -> None:
    for path, profile in zip(args.profile, profiles, strict=True):
        if not any(kind.knows_imbalance for kind in profile.kinds):
            raise OptionError(
                f"--imbalance-percentile {args.imbalance_percentile:g}: {path} records no routing "
                "imbalance. Leave the flag out, or profile a model with experts."
            )


def _layout(args: argparse.Namespace, profile: Profile) -> Layout:
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


def _plan(args: argparse.Namespace) -> None:
    planners = _planners(args)
    _check_micro_batches(args, planners)
    budget = args.budget_gib[0] if len(args.budget_gib) == 1 else args.budget_gib
    planner, notes = planners[0], list[str]()
    flags: dict[str, str] = {}
    if args.search_micro_batch:
        found, sentences = search_micro_batch(planners, budget)
        planner, notes = found.planner, list(sentences)
        flags.update(found.megatron_flags)
    if args.search_layout:
        found = search_layout(planner, budget)
        planner = found.planner
        notes.append(found.note)
        flags.update(found.megatron_flags)
    try:
        plan = make_plan(
            planner, budget, curve_points=args.curve_points, megatron_flags=flags, notes=notes
        )
    except InfeasibleError as error:
        raise explained(error, planner, budget) from error
    if args.output:
        plan.save(args.output)
    _print_plan(args, plan)
    if args.verify:
        _verify(args, plan)


def _print_plan(args: argparse.Namespace, plan: Plan) -> None:
    lines = launch_lines(plan)
    _print(args, plan.to_json(), terminal.plan_view(plan))
    if not args.json:
        for line in lines:
            print(line)  # not through rich: a wrapped line cannot be pasted


def _verify(args: argparse.Namespace, plan: Plan) -> None:
    with _quiet_upstream(), _progress() as bar:
        verify = _module("meta.verify")
        task = bar.add_task("Megatron's schedule, stage by stage", total=plan.layout.num_stages)
        checks = verify.verify(plan, lambda _: bar.advance(task))
    data = [asdict(check) | {"error": check.error, "fits": check.fits} for check in checks]
    _print(args, json.dumps(data, indent=1), verify.table(checks))
    verify.require_verified(checks)


def _check_micro_batches(args: argparse.Namespace, planners: Sequence[Planner]) -> None:
    found = [planner.profile.parallelism.micro_batch_size for planner in planners]
    asked = args.search_micro_batch or found[:1]
    if sorted(asked) != sorted(found):
        raise ProfileError(
            f"Asked for micro-batch sizes {sorted(asked)}, the given profiles are of {found}. "
            "Give --profile one file for each size that --search-micro-batch names."
        )


def _show(args: argparse.Namespace) -> None:
    _print_plan(args, Plan.load(args.plan))


def _explain(args: argparse.Namespace) -> None:
    plan = Plan.load(args.plan)
    if args.layer is None:
        evidence = json.dumps([asdict(item) for item in plan.evidence], indent=1)
        _print(args, evidence, terminal.stages_explained(plan))
        return
    found = neighbours(plan.planner(), plan.policy, args.layer)
    stage = next(
        number
        for number, chunks in enumerate(plan.layout.stages)
        if any(args.layer in chunk.layers for chunk in chunks)
    )
    rows = terminal.neighbour_rows(plan, stage, found)
    data = {
        "layer": args.layer,
        "stage": stage,
        "choice": plan.recompute_policy[args.layer],
        "binding": plan.evidence[stage].binding,
        "others": rows,
    }
    view = terminal.neighbours_view(plan, args.layer, stage, found)
    _print(args, json.dumps(data, indent=1), view)


def _pareto(args: argparse.Namespace) -> None:
    planners = _planners(args)
    _check_micro_batches(argparse.Namespace(search_micro_batch=()), planners)
    with _progress() as bar:
        task = bar.add_task("Budgets", total=1)
        found = planners[0].pareto(args.points, lambda share: bar.update(task, completed=share))
    points = [curve_point(point) for point in found]
    data = json.dumps([asdict(point) for point in points], indent=1)
    said = terminal.imbalance_lines(planners[0].profile, planners[0].percentile)
    _print(args, data, Group(terminal.curve_view(points), *map(Text, said)))


def _progress() -> Progress:
    """A bar on standard error while it is a terminal, gone when it is done."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _quiet_upstream() -> Iterator[None]:
    """Without what torch and megatron-core warn of on machines without CUDA, TE and Apex."""
    for_processes = {"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    with warnings.catch_warnings(), patched_environ(for_processes):
        warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
        yield


def _print(args: argparse.Namespace, data: str, view: RenderableType) -> None:
    if args.json:
        print(data.rstrip("\n"))
    else:
        Console(highlight=False).print(view)
