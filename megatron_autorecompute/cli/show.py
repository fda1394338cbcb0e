"""The commands that read a plan: `show`, `explain`, `report` and `trace`."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from megatron_autorecompute import json_records
from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command, at_least, file
from megatron_autorecompute.cli.output import (
    add_json,
    add_output,
    add_verbose,
    check_output,
    output_file,
    print_plan,
    print_result,
    shown_progress,
    without_effect,
)
from megatron_autorecompute.cli.profile_view import profile_view
from megatron_autorecompute.cli.throughput import throughput_words
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern, pattern_of_job
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import (
    NONE,
    WHOLE_LAYER,
    LayerPolicy,
    RecomputePolicy,
)
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report import terminal
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.recorded import recorded_step
from megatron_autorecompute.report.trace import trace_json


class ShowCommand(Command):
    """Prints a plan in the same form as `plan`, a profile in the same form as `estimate`."""

    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's or profile's file."""
        parser.add_argument("plan", metavar="FILE.json", help="a plan or a profile")
        parser.add_argument(
            "--svg",
            type=file,
            metavar="FILE",
            help="also draw the policy for a document; - prints the picture alone",
        )
        parser.add_argument(
            "--for-hybrid",
            action="store_true",
            help="print a GPT's plan for a HybridModel of the same layers: pattern and policy",
        )
        add_json(parser)
        add_verbose(parser)

    def run(self, args: Namespace) -> None:
        """Print it.

        Raises ProfileError if the file is neither plan nor profile or the picture cannot be
        written, OptionError for a picture that would replace it, and for a picture or a translation
        of a profile.
        """
        if args.svg and not streams.is_standard_output(args.svg):
            check_output(args, args.svg)
        text = json_records.read(args.plan, Plan.__name__)
        if json_records.has_fields(text, "kinds", "parallelism"):
            for flag, given in (("--svg", args.svg), ("--for-hybrid", args.for_hybrid)):
                if given:
                    raise without_effect(flag, args.plan, "it is a profile and has no policy")
            profile = Profile.from_json(text, str(args.plan))
            print_result(args, profile.to_json(), profile_view(profile, args.verbose))
            return
        plan = Plan.from_json(text, str(args.plan))
        if args.for_hybrid:
            _print_for_hybrid(args, plan)
            return
        if args.svg:
            from megatron_autorecompute.report.strip import strip_svg  # loads matplotlib

            picture = strip_svg(plan)
            if streams.is_standard_output(args.svg):
                if args.json:
                    alone = "the picture is printed alone"
                    raise without_effect("--json", f"--svg {args.svg}", alone)
                streams.write(picture)
                return
            write_atomically(picture, args.svg)
            streams.say(f"Drawn: {args.svg}")
        print_plan(args, plan)


def _print_for_hybrid(args: Namespace, plan: Plan) -> None:
    pattern = pattern_of_plan(plan)
    policy = for_hybrid(plan.policy, plan.layout.num_layers)
    found = {"hybrid_layer_pattern": str(pattern), "recompute_policy": policy.format()}
    if args.json:
        streams.write(json.dumps(found) + "\n")
        return
    streams.write(
        "".join(f"--{name.replace('_', '-')} {shlex.quote(v)}\n" for name, v in found.items())
    )


OF_ATTENTION = frozenset({"core_attn", "mla_up_proj", "gdn_norm_out"})
"""Modules of the attention layer. All others, but norms, belong to the second one."""
NORMS = frozenset({"layernorm", "ln_out"})
"""Modules of both layers. An MLP that runs again runs its fused norm again."""
OFFLOADED_OF_ATTENTION = frozenset({"attn_norm", "qkv_linear", "core_attn", "attn_proj"})
"""Offloaded modules of the attention layer. All others belong to the second one."""


def for_hybrid(policy: RecomputePolicy, num_layers: int) -> RecomputePolicy:
    """The policy with two choices for each of the first `num_layers` layers.

    Depths of multi-token prediction, which come after them, stay one choice each: a depth of a
    HybridModel is a stack of its own with one index.
    """
    return RecomputePolicy(
        (
            *(half for choice in policy.layers[:num_layers] for half in _halves(choice)),
            *policy.layers[num_layers:],
        )
    )


def _halves(choice: LayerPolicy) -> Iterator[LayerPolicy]:
    if choice.granularity == "full":
        yield from [replace(choice, group=2 * choice.group)] * 2
        return
    modules, offload = set(choice.modules), set(choice.offload)
    norms = modules & NORMS
    both = offload & {WHOLE_LAYER}
    own_norms = norms - {"ln_out"} if "mlp" in modules else norms
    for part, moved in (
        (modules & OF_ATTENTION | norms, offload & OFFLOADED_OF_ATTENTION),
        (modules - OF_ATTENTION - NORMS | own_norms, offload - OFFLOADED_OF_ATTENTION),
    ):
        chosen = tuple(part)
        own = LayerPolicy("selective", chosen, rerun_all=choice.rerun_all) if chosen else NONE
        keep = choice.keep if "moe" in chosen else ()
        yield replace(own, keep=keep, offload=tuple(moved | both))


def pattern_of_plan(plan: Plan) -> HybridPattern:
    """The pattern of the HybridModel with the plan's layers and stages.

    Raises OptionError for a plan of a hybrid model, or of layers that no pattern has.
    """
    profile, layout = plan.profile, plan.layout
    config = profile.model.facts.get("transformer_config") or {}
    if pattern_of_job(profile.model.facts) is not None:
        raise OptionError(f"{profile.model.name} is already a hybrid model: use its own policy.")
    attention = "+" if config.get("multi_latent_attention") else "*"
    symbols = []
    for layer in range(profile.num_layers):
        name = profile.kind_of(layer).name.split("-")[0]
        if name not in ("dense", "moe", "mtp"):
            raise OptionError(f"Layer {layer} is of kind {name}, which no hybrid pattern has.")
        symbols.append(attention + ("E" if name == "moe" else "-"))
    layers = layout.num_layers
    chunks = ([i for i in chunk if i < layers] for chunk in layout.chunk_layers())
    segments = tuple("".join(symbols[i] for i in chunk) for chunk in chunks)
    depth = symbols[layers - 1] if layout.mtp_num_layers else ""  # like the last layer
    return HybridPattern(segments, depth, layout.mtp_num_layers)


class ExplainCommand(Command):
    """Prints the binding moment of every stage."""

    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print it; raises ProfileError for a file that is no plan."""
        plan = Plan.load(args.plan)
        evidence = json.dumps([asdict(item) for item in plan.evidence], indent=1)
        print_result(args, evidence, terminal.stages_explained(plan))


class ReportCommand(Command):
    """Writes a plan as one HTML file."""

    reads = ("plan", "snapshot")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the paths of plan and page."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_output(parser, "PLAN.html", "file to write (default: beside the plan); - prints it")
        parser.add_argument(
            "--snapshot",
            type=Path,
            metavar="RANK0.pickle",
            help="also draw the memory history that torch.cuda.memory._dump_snapshot wrote",
        )
        parser.add_argument(
            "--stage",
            type=at_least(0),
            help="pipeline stage of the snapshot (default: by the rank in the file's name)",
        )

    def run(self, args: Namespace) -> None:
        """Write the page and print its path.

        Raises:
            ProfileError: the file is no plan, the snapshot is none, or the page cannot be written.
            OptionError: the page would replace the plan or the snapshot; the snapshot's stage is
                not known, or is given without a snapshot.
        """
        if args.stage is not None and args.snapshot is None:
            raise OptionError("--stage is the stage of a snapshot: give --snapshot FILE with it.")
        if args.output is None:
            args.output = Path(os.path.splitext(args.plan)[0] + ".html")
        from megatron_autorecompute.report.html import html  # loads matplotlib

        output, plan = output_file(args), Plan.load(args.plan)
        recorded = recorded_step(plan, args.snapshot, args.stage) if args.snapshot else None
        with shown_progress() as progress:
            data = replace(report_data(plan, progress), recorded=recorded)
        page = html(replace(data, speed=throughput_words(plan)))
        if output is None:
            streams.write(page)
            return
        write_atomically(page, output)
        print(streams.printable(f"Written: {output}. Open it in a browser; it needs no network."))


class TraceCommand(Command):
    """Writes a plan's step as Chrome trace events."""

    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the paths of plan and trace."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_output(
            parser,
            "FILE",
            "file to write, compressed if it ends with .gz (default: PLAN.trace.json.gz "
            "beside the plan); - prints it",
        )

    def run(self, args: Namespace) -> None:
        """Write the trace and print its path; raises ProfileError if the file is no plan."""
        if args.output is None:
            args.output = Path(os.path.splitext(args.plan)[0] + ".trace.json.gz")
        output, plan = output_file(args), Plan.load(args.plan)
        text = trace_json(plan)
        if output is None:
            streams.write(text)
            return
        compressed = output.suffix == ".gz"
        write_atomically(gzip.compress(text.encode(), mtime=0) if compressed else text, output)
        said = f"Written: {output}. Open it in https://ui.perfetto.dev or chrome://tracing."
        print(streams.printable(said))
