"""The pipeline that is planned: as flags say it, else as the profile's job runs it, which the
profile, or the plan file it is in, may know.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_autorecompute import json_records
from megatron_autorecompute.cli.output import without_effect
from megatron_autorecompute.errors import OptionError, PipelineError
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern, pattern_of_job
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.layout_flags import layout_flags
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.profile import SCHEMA_VERSION, Profile

SPLIT = (
    "vp",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Options that say how layers are split, besides --pp."""
MICRO_BATCH_SIZE = "--micro-batch-size"


@dataclass(frozen=True, slots=True)
class Known:
    """What a file knows of the pipeline that its profile was made for."""

    layout: Layout | None = None
    """The layers of each stage and chunk; None: not known."""
    num_microbatches: int | None = None
    """The number of microbatches of a step; None: not known."""
    microbatch_group_size: int | None = None
    """Megatron's setting of that name; None: its default, the number of stages."""
    overlap_moe_expert_parallel_comm: bool = False
    """Megatron's setting of that name."""
    megatron_flags: Mapping[str, str] = field(default_factory=dict)
    """Further flags that a plan file's plan needs, name to value."""

    @classmethod
    def of(cls, layout: Layout, schedule: Schedule, flags: Any = None) -> Known:
        """All of a pipeline that a file has."""
        return cls(
            layout,
            schedule.num_microbatches,
            schedule.microbatch_group_size,
            schedule.overlap_moe_expert_parallel_comm,
            flags if isinstance(flags, dict) else {},
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """The pipeline to plan for."""

    layout: Layout
    schedule: Schedule
    notes: tuple[str, ...] = ()
    """One sentence for each flag that contradicts the profile."""
    megatron_flags: Mapping[str, str] = field(default_factory=dict)
    """Flags that the layout, or the profile's micro-batch size, needs."""


def read_profile(path: str | Path) -> tuple[Profile, Known]:
    """The profile in a profile or plan file, and what the file knows of its pipeline.

    Raises ProfileError if the file cannot be read.
    """
    text = json_records.read(path, Profile.__name__)
    profile = json_records.from_json(
        Profile, text, source=str(path), major=SCHEMA_VERSION, field="profile"
    )
    data = json.loads(text)
    if not data.keys() >= {"profile", "layout", "schedule"}:
        return profile, known_of(profile)
    layout = json_records.from_json(Layout, text, source=str(path), field="layout")
    schedule = json_records.from_json(Schedule, text, source=str(path), field="schedule")
    return profile, Known.of(layout, schedule, data.get("megatron_flags"))


def known_of(profile: Profile) -> Known:
    """What a profile knows of its job's pipeline."""
    facts = profile.model.facts
    with suppress(OptionError, PipelineError):  # a job that another version described
        job = job_from(facts.get("job"), "model.facts.job")
        return Known.of(job.layout(), job.schedule())
    config = facts.get("transformer_config")
    config = config if isinstance(config, dict) else {}
    step = profile.measured_step
    number = facts.get("num_microbatches") if step is None else step.num_microbatches
    group = config.get("microbatch_group_size_per_vp_stage")
    return Known(
        _layout_of_stages(profile),
        number if isinstance(number, int) else None,
        group if isinstance(group, int) else None,
        bool(config.get("overlap_moe_expert_parallel_comm")),
    )


def _layout_of_stages(profile: Profile) -> Layout | None:
    """The layout of the stages' records: layers that follow each other are one chunk."""
    runs = [consecutive(stage.layers) for stage in profile.stages]
    if not runs or len(set(map(len, runs))) != 1 or not runs[0]:
        return None
    last = len(runs) - 1, len(runs[0]) - 1
    stages = tuple(
        tuple(
            Chunk(run, embedding=(stage, chunk) == (0, 0), head=(stage, chunk) == last)
            for chunk, run in enumerate(of_stage)
        )
        for stage, of_stage in enumerate(runs)
    )
    with suppress(PipelineError):
        layout = Layout(stages, profile.model.mtp_num_layers)
        return layout if layout.num_layers == profile.model.num_layers else None
    return None


def consecutive(layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The numbers in runs in which each is one more than the one before."""
    cuts = [at for at, (a, b) in enumerate(pairwise(layers), start=1) if b != a + 1]
    edges = [0, *cuts, len(layers)] if layers else []
    return [layers[start:stop] for start, stop in pairwise(edges)]


def asked_pipeline(args: Namespace, profile: Profile, known: Known) -> Asked:
    """The pipeline that flags ask for; what they leave open is as the profile knows it.

    With --pp the layout is as flags and Megatron's defaults say. Raises OptionError if the number
    of microbatches is open or an option has no effect, PipelineError if Megatron refuses it.
    """
    layout = _layout(args, profile, known)
    if args.overlap_moe_expert_parallel_comm and profile.parallelism.expert_parallel == 1:
        raise without_effect(
            "--overlap-moe-expert-parallel-comm",
            "a profile of expert parallel size 1",
            "no rank exchanges tokens with another",
        )
    same = layout == known.layout
    as_known = known if args.pp is None else Known()
    group_size = args.microbatch_group_size
    if group_size is None:
        group_size = as_known.microbatch_group_size
    schedule = Schedule.of_layout(
        layout,
        _num_microbatches(args, layout, known),
        microbatch_group_size=group_size,
        overlap_moe_expert_parallel_comm=args.overlap_moe_expert_parallel_comm
        or as_known.overlap_moe_expert_parallel_comm,
    )
    kept = {n: v for n, v in known.megatron_flags.items() if same or n == MICRO_BATCH_SIZE}
    pattern = pattern_of_job(profile.model.facts)
    if pattern is not None and not same:
        kept |= layout_flags(layout, pattern)
    return Asked(layout, schedule, tuple(_contradictions(known, layout, schedule)), kept)


def _layout(args: Namespace, profile: Profile, known: Known) -> Layout:
    given = {name: getattr(args, name) for name in SPLIT}
    split = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    refused = [name for name in split if name.startswith(("account", "pipeline"))]
    refused += ["overlap_moe_expert_parallel_comm"] * args.overlap_moe_expert_parallel_comm
    if refused and pattern_of_job(profile.model.facts) is not None:
        raise OptionError(
            f"--{refused[0].replace('_', '-')}: Megatron does not run it with a HybridModel, whose "
            "chunks are those of its pattern. Leave it out; --pp, --vp and --search-layout place "
            "layers."
        )
    pp = args.pp
    if pp is None and known.layout is not None:
        if not split:
            return known.layout
        pp = known.layout.num_stages
        if "pipeline_model_parallel_layout" not in split:
            split.setdefault("vp", known.layout.num_chunks)
    if (pattern := pattern_of_job(profile.model.facts)) is not None:
        return _layout_of_pattern(pattern, 1 if pp is None else pp, split)
    in_front = profile.model.encoder_layers  # the flags are of the decoder
    return Layout.from_flags(
        profile.model.num_layers - in_front,
        1 if pp is None else pp,
        mtp_num_layers=profile.model.mtp_num_layers,
        **split,
    ).behind(in_front)


def _layout_of_pattern(pattern: HybridPattern, pp: int, split: dict[str, Any]) -> Layout:
    """A hybrid model's layers in other stages: as many in each, or as Megatron's two numbers say.

    Raises PipelineError for numbers that do not fit.
    """
    vp = split.pop("vp", None) or 1
    if vp == 1:
        whole = pattern.placed([range(pattern.num_layers)])
        return Layout.from_pattern(whole, pp, **split)
    if pattern.num_layers % (pp * vp) or split:
        raise PipelineError(
            f"hybrid_layer_pattern {str(pattern)!r:.200}: its {pattern.num_layers} layers cannot "
            f"be divided evenly among {pp} stages of {vp} chunks. Place | in the pattern of the "
            "job, or let --search-layout place it."
        )
    return Layout.from_flags(pattern.num_layers, pp, vp, mtp_num_layers=pattern.mtp_num_layers)


def _num_microbatches(args: Namespace, layout: Layout, known: Known) -> int:
    if args.num_microbatches is not None:
        return int(args.num_microbatches)
    if known.num_microbatches is None:
        raise OptionError(
            f"{args.profile[0]} does not say how many microbatches a step has: give "
            "--num-microbatches M."
        )
    if known.layout is not None and known.layout.num_stages != layout.num_stages:
        raise OptionError(
            f"--pp {layout.num_stages}: the profile knows the microbatches of "
            f"{_counted(known.layout.num_stages, 'stage')}; with another number of stages give "
            "--num-microbatches M."
        )
    return known.num_microbatches


def _contradictions(known: Known, layout: Layout, schedule: Schedule) -> list[str]:
    """A sentence if the profile is of another pipeline than the planned one."""
    was = known.layout or layout
    number = known.num_microbatches or schedule.num_microbatches
    if (was, number) == (layout, schedule.num_microbatches):
        return []
    then, now = _shape(was, number), _shape(layout, schedule.num_microbatches)
    if then == now:
        now = "other layers on these stages"
    return [f"The profile is of {then}; this is planned for {now}, as the flags say."]


def shape_words(known: Known) -> str | None:
    """What is known of the pipeline, in words; None if nothing is."""
    if known.layout is None:
        return None
    return _shape(known.layout, known.num_microbatches)


def _shape(layout: Layout, num_microbatches: int | None) -> str:
    words = _counted(layout.num_stages, "stage")
    if layout.num_chunks > 1:
        words += f" of {layout.num_chunks} chunks"
    if num_microbatches is not None:
        words += f", {_counted(num_microbatches, 'microbatch')}"
    return words


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
