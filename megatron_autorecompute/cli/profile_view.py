"""A profile as text: what it is, records, static bytes, assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megatron_autorecompute.cli.pipeline import consecutive, known_of, shape_words
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report.terminal import Column, assumption_lines, rows
from megatron_autorecompute.report.words import came_from, clocks
from megatron_autorecompute.units import MIB, unit_for


def profile_view(profile: Profile, verbose: bool, where: str = "") -> Group:
    """What the profile is of, records, static bytes, assumptions: every one if `verbose`, or only
    their number. `where` follows the number of layers in the title."""
    title = f"{profile.model.name}: {profile.num_layers} layers{where}; {came_from(profile)}"
    parts: list[Text | Table] = [Text(title, style="bold"), *map(Text, _made_for(profile))]
    parts.append(_records(profile))
    if profile.stages:
        parts.append(_static(profile))
    parts += map(Text, clocks(profile))
    parts += map(Text, assumption_lines(profile.assumptions, verbose))
    return Group(*parts)


def _made_for(profile: Profile) -> Iterator[str]:
    """Shapes, pipeline, device, and where the figures come from."""
    shape = profile.parallelism
    words = [f"micro-batch {shape.micro_batch_size}", f"sequence {shape.seq_length}"]
    sizes = {
        "tp": shape.tensor_parallel,
        "cp": shape.context_parallel,
        "ep": shape.expert_parallel,
        "etp": shape.expert_tensor_parallel if shape.expert_parallel > 1 else 1,
    }
    words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    pipeline = shape_words(known_of(profile))
    words.append(pipeline or "pipeline not known")
    if device := profile.fingerprint.get("device"):
        words.append(device)
    yield ", ".join(words)
    sources = Counter(record.source for kind in profile.kinds for record in kind.choices)
    yield "Records: " + "; ".join(f"{number} ({source})" for source, number in sources.items())


def _records(profile: Profile) -> Table:
    def in_graphs(row: Any) -> str:
        held_bytes = row[1].graph.held_bytes if row[1].graph else 0
        return _mib(held_bytes) if profile.graphs_of_layers else ""

    named = [(f"{len(k.layers)} {k.name}", r) for k in profile.kinds for r in k.choices]
    norm = [("final norm", profile.final_norm)] if profile.final_norm else []
    shown = [("embedding", profile.embedding), *named, *norm, ("head", profile.head)]
    columns = (
        Column("layers", lambda row: row[0], left=True),
        Column("choice", lambda row: row[1].choice, left=True),
        Column("graph MiB", in_graphs),
        Column("held MiB", lambda row: _mib(row[1].held_bytes)),
        Column("fwd +MiB", lambda row: _mib(row[1].forward_transient_bytes)),
        Column("bwd +MiB", lambda row: _mib(row[1].backward_transient_bytes)),
        Column("fwd ms", lambda row: f"{row[1].forward_ms:.2f}"),
        Column("bwd ms", lambda row: f"{row[1].backward_ms:.2f}"),
        Column("comm.", _communication),
    )
    return rows(columns, shown)


def _communication(row: Any) -> str:
    """Nothing for less than two digits show."""
    return f"{row[1].communication_ms:.2f}" if row[1].communication_ms >= 0.005 else ""


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f}" if size_bytes >= 10 * MIB else f"{size_bytes / MIB:.3g}"


def _static(profile: Profile) -> Table:
    """One row for all stages with equal figures."""
    unit = unit_for(stage.static.total_bytes for stage in profile.stages)
    stages: dict[tuple[int, ...], list[int]] = {}
    for number, static in enumerate(stage.static for stage in profile.stages):
        weights = static.parameter_bytes, static.gradient_bytes, static.optimizer_state_bytes
        stages.setdefault((*weights, static.all_buffer_bytes), []).append(number)
    columns = (
        Column("stage", lambda row: _numbers(row[1])),
        Column(f"weights {unit.name}", lambda row: unit.text(row[0][0])),
        Column("gradients", lambda row: unit.text(row[0][1])),
        Column("optimizer", lambda row: unit.text(row[0][2])),
        Column("buffers", lambda row: unit.text(row[0][3])),
        Column("static", lambda row: unit.text(sum(row[0]))),
    )
    return rows(columns, list(stages.items()))


def _numbers(numbers: list[int]) -> str:
    """`0, 2-6, 8` for numbers in ascending order."""
    runs = consecutive(tuple(numbers))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
