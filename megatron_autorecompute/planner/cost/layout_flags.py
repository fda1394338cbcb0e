"""Layouts as Megatron's flags, and the layouts that its flags for uneven stages can give."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern
from megatron_autorecompute.planner.cost.layout import Layout

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
TEXT = "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"


def layers_per_stage(layout: Layout) -> list[int]:
    """How many layers each stage has, all its chunks together."""
    return [sum(len(chunk.layers) for chunk in stage) for stage in layout.stages]


def uneven_sizes(shape: Layout) -> Iterator[tuple[int, int, int]]:
    """The layers of the first stage, of each one between, and of the last, MTP depths not counted,
    that the flags for uneven stages may give a layout of as many stages and chunks."""
    layers, chunks, between = shape.num_layers, shape.num_chunks, shape.num_stages - 2
    for middle in range(chunks, layers // between + 1, chunks) if between else [0]:
        ends = layers - middle * between
        for first in range(chunks, ends, chunks):
            yield first, middle, ends - first


def layout_flags(layout: Layout, pattern: HybridPattern | None = None) -> dict[str, str]:
    """Megatron's flags that give a layout, name to value; a HybridModel's chunks are separated in
    its pattern."""
    if pattern is not None:
        return {PATTERN: str(pattern.placed(layout.chunk_layers()))}
    layers = layers_per_stage(layout)
    first, last = layers[0], layers[-1] - layout.mtp_num_layers
    chunks = {CHUNKS: str(layout.num_chunks)} if layout.num_chunks > 1 else {}
    if uneven_layout(layout, first, last) != layout:
        return {TEXT: layout_text(layout)}
    return {FIRST: str(first), **({} if _first_alone(layout) else {LAST: str(last)}), **chunks}


def _first_alone(shape: Layout) -> bool:
    """Whether Megatron takes the first stage's number alone: 2 stages of several chunks."""
    return shape.num_stages == 2 and shape.num_chunks > 1


def uneven_layout(shape: Layout, first: int, last: int) -> Layout | None:
    """The uneven layout of so many layers, stages and chunks; None if Megatron refuses these."""
    try:
        return Layout.from_flags(
            shape.num_layers,
            shape.num_stages,
            shape.num_chunks,
            mtp_num_layers=shape.mtp_num_layers,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=None if _first_alone(shape) else last,
        )
    except PipelineError:
        return None


def layout_text(layout: Layout) -> str:
    """A layout as Megatron's `pipeline_model_parallel_layout` takes it, such as Et*3|t*2L."""
    decoder = range(layout.num_layers)
    rows = []
    for layers in layout.chunk_layers():
        count = sum(layer in decoder for layer in layers)
        rows.append(f"t*{count}" * (count > 1) + "t" * (count == 1) + "m" * (len(layers) - count))
    return f"E{'|'.join(rows)}L"
