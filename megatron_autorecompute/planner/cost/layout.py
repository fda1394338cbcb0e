"""Which stage and which chunk on it holds which layers, as Megatron's layout flags say.

A *stage* is a pipeline rank, a *chunk* a virtual stage on it; layer indices are 0-based and global.
*Model order* is the order in which a microbatch passes the chunks: chunk 0 of every stage, then
chunk 1 of every stage, and so on. megatron-core 0.16.1 and 0.19.2 place layers in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern

_MAX_LAYOUT_LENGTH = 10_000  # a mistyped t*9999999999 must not fill the memory
_SYMBOL_OF_NAME = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual stage holds: layers, and perhaps embedding or head."""

    layers: tuple[int, ...]
    """Global layer indices in the order they run; MTP depth d is `num_layers + d`. May be empty."""

    embedding: bool = False
    """Whether the model starts here. A chunk with MTP layers has a copy of the embedding's weights,
    which does not count."""

    head: bool = False
    """Whether the model ends here: final norm, output layer, loss."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunks of every stage, indexed `[stage][chunk]`.

    Raises PipelineError if stages differ in their number of chunks, or if the layers in model order
    are not 0, 1, 2, …
    """

    stages: tuple[tuple[Chunk, ...], ...]
    """The chunks of every stage, first stage first."""
    mtp_num_layers: int = 0
    """How many of the last layers are MTP depths."""

    def __post_init__(self) -> None:
        if not self.stages or not self.stages[0] or len(set(map(len, self.stages))) != 1:
            raise PipelineError(
                "A layout needs at least one stage, and the same number of chunks on each; "
                f"found {[len(chunks) for chunks in self.stages]} chunks."
            )
        layers = [layer for chunk in self.chunk_layers() for layer in chunk]
        if layers != list(range(len(layers))) or not 0 <= self.mtp_num_layers <= len(layers):
            raise PipelineError(
                "The layers of a layout must be 0, 1, 2, … in model order, the MTP depths last; "
                f"found {layers} with {self.mtp_num_layers} MTP depths."
            )

    @property
    def num_stages(self) -> int:
        """Pipeline-parallel size p."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Virtual stages on each stage, v."""
        return len(self.stages[0])

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model, MTP depths not counted."""
        layers = sum(len(chunk.layers) for chunks in self.stages for chunk in chunks)
        return layers - self.mtp_num_layers

    def stage_of(self, layer: int) -> int:
        """The stage that has a layer."""
        each = ((stage, chunk) for stage, own in enumerate(self.stages) for chunk in own)
        return next(stage for stage, chunk in each if layer in chunk.layers)

    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of every chunk, in model order."""
        return tuple(chunk.layers for chunks in zip(*self.stages, strict=True) for chunk in chunks)

    def counted_chunks(self, encoder_layers: int = 0) -> tuple[tuple[int, ...], ...]:
        """The layers of every block, in model order; `uniform` and `block` count within a block.

        MTP depths are in no block. An encoder, the first `encoder_layers` layers of the model, has
        its own blocks.
        """
        parts = [range(encoder_layers, self.num_layers)]
        if encoder_layers:
            parts.insert(0, range(encoder_layers))
        chunks = self.chunk_layers()
        return tuple(tuple(i for i in chunk if i in part) for part in parts for chunk in chunks)

    def behind(self, layers: int) -> Layout:
        """The layout with so many more layers in front, in the first chunk: those of an encoder, or
        of a vision tower."""
        moved = [
            [replace(chunk, layers=tuple(layers + i for i in chunk.layers)) for chunk in chunks]
            for chunks in self.stages
        ]
        first = moved[0][0]
        moved[0][0] = replace(first, layers=(*range(layers), *first.layers))
        return Layout(tuple(map(tuple, moved)), self.mtp_num_layers)

    @classmethod
    def from_flags(
        cls,
        num_layers: int,
        pp: int,
        vp: int | None = None,
        *,
        mtp_num_layers: int = 0,
        num_layers_in_first_pipeline_stage: int | None = None,
        num_layers_in_last_pipeline_stage: int | None = None,
        account_for_embedding_in_pipeline_split: bool = False,
        account_for_loss_in_pipeline_split: bool = False,
        pipeline_model_parallel_layout: str | Sequence[Sequence[str]] | None = None,
    ) -> Layout:
        """Place layers as Megatron does for the flags of the same names.

        pp is the number of stages, vp that of chunks per stage; None takes it from
        `pipeline_model_parallel_layout`, else 1.

        Raises PipelineError if Megatron refuses the flags, and in two cases in which Megatron
        silently builds fewer layers: a first and a last number on a single stage, or both together
        more than all layers. Source: `get_num_layers_to_build` in `transformer_block.py`,
        `get_transformer_layer_offset` in `transformer_layer.py`, `get_mtp_num_layers_to_build` in
        `multi_token_prediction.py`, and the checks of `TransformerConfig.__post_init__`.
        """
        check_at_least(1, num_layers=num_layers, pp=pp, vp=1 if vp is None else vp)
        check_at_least(0, mtp_num_layers=mtp_num_layers)
        uneven = (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage)
        extra = (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split)
        layout = pipeline_model_parallel_layout
        if (layout is not None) + (uneven != (None, None)) + any(extra) > 1:
            raise PipelineError(
                "Asked for more than one of: pipeline_model_parallel_layout, num_layers_in_first/"
                "last_pipeline_stage, account_for_embedding/loss_in_pipeline_split. Megatron takes "
                "one of the three; keep one."
            )
        if layout is not None:
            found = cls.parse(layout, pp, vp)
            counts = found.num_layers, found.mtp_num_layers
            if counts != (num_layers, mtp_num_layers):
                raise PipelineError(
                    f"Layout {layout!r} has {counts[0]} layers and {counts[1]} MTP depths; the "
                    f"model has {num_layers} and {mtp_num_layers}."
                )
            return found
        vp = 1 if vp is None else vp
        check_chunks(pp, vp)
        if pp == 2 and vp > 1 and None not in uneven:
            raise PipelineError(
                "Asked for the number of layers of both of 2 stages, with several chunks: "
                "Megatron divides by the number of stages between them, zero. Give neither, or "
                "a pipeline_model_parallel_layout."
            )
        layers = _layers_per_stage(num_layers + sum(extra), pp, *uneven, least=1)
        rows = _rows_of_stages(layers, vp, *extra)
        rows[-1] += "m" * mtp_num_layers
        return cls.from_rows(rows, pp)

    @classmethod
    def of_config(cls, config: Any, pattern: HybridPattern | None) -> Layout:
        """Place layers as Megatron does for an object with the fields of its TransformerConfig, and
        a HybridModel's pattern. Raises: as `from_flags` and `from_pattern`."""
        pp, vp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        ends = {
            "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
        }
        if pattern is not None:
            # A model built without chunks would leave out the other segments.
            return cls.from_pattern(pattern, pp, vp or 1, **ends)
        given = config.pipeline_model_parallel_layout
        return cls.from_flags(
            config.num_layers,
            pp,
            vp,
            mtp_num_layers=config.mtp_num_layers or 0,
            account_for_embedding_in_pipeline_split=config.account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=config.account_for_loss_in_pipeline_split,
            # Megatron turns the text or list into an object that keeps the original.
            pipeline_model_parallel_layout=getattr(given, "input_data", given) or None,
            **ends,
        )

    @classmethod
    def parse(cls, layout: str | Sequence[Sequence[str]], pp: int, vp: int | None = None) -> Layout:
        """Read a layout such as `Et*3|(tt|)*6mL` (E embedding, t layer, m MTP depth, L loss), or
        the names of layers of every chunk.

        `|` separates chunks in model order, `*n` repeats a symbol or a parenthesis, commas are
        ignored. Raises PipelineError if Megatron refuses the text. Source: the class
        `PipelineParallelLayerLayout` in `pipeline_parallel_layer_layout.py`.
        """
        check_at_least(1, pp=pp, vp=1 if vp is None else vp)
        if isinstance(layout, str):
            rows = _unroll(layout).split("|")
        else:
            rows = ["".join(map(_symbol, row)) for row in layout]
        _check_rows(rows, pp, vp)
        return cls.from_rows(rows, pp)

    @classmethod
    def from_pattern(
        cls,
        pattern: HybridPattern,
        pp: int,
        vp: int | None = None,
        *,
        num_layers_in_first_pipeline_stage: int | None = None,
        num_layers_in_last_pipeline_stage: int | None = None,
    ) -> Layout:
        """Place the layers of a HybridModel as its pattern says: a segment is a chunk. Without `|`
        they are split evenly, or by the two numbers. MTP depths are in the last chunk.

        Raises PipelineError if Megatron refuses the numbers, or would leave out layers.
        """
        check_at_least(1, pp=pp, vp=1 if vp is None else vp)
        ends = (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage)
        shown = f"hybrid_layer_pattern {str(pattern)!r:.200}"
        segments = [len(segment) for segment in pattern.segments]
        if len(segments) == 1 and pp > 1:
            if (vp or 1) > 1:
                raise PipelineError(
                    f"{shown} has no |, so Megatron builds one chunk per stage; asked for {vp}. "
                    f"Separate {pp} x {vp} chunks by |."
                )
            segments = _layers_per_stage(pattern.num_layers, pp, *ends)
        elif len(segments) > 1 and ends != (None, None):
            raise PipelineError(
                f"{shown} places layers by |, beside num_layers_in_first/last_pipeline_stage. "
                "Megatron takes one of the two; keep one."
            )
        else:
            pattern.check_segments(pp, vp)
        check_chunks(pp, len(segments) // pp)
        rows = ["t" * segment for segment in segments]
        rows[-1] += "m" * pattern.mtp_num_layers
        return cls.from_rows(rows, pp)

    @classmethod
    def from_rows(cls, rows: Sequence[str], pp: int) -> Layout:
        """Build from one string of symbols per chunk, in model order; see `parse`."""
        chunks, start = [], 0
        for position, row in enumerate(rows):
            stop = start + row.count("t") + row.count("m")
            # Megatron builds embedding and head on the first and last chunk, wherever E and L
            # stand: other chunks before E or after L can only be empty.
            first, last = position == 0, position == len(rows) - 1
            chunks.append(Chunk(tuple(range(start, stop)), embedding=first, head=last))
            start = stop
        stages = tuple(tuple(chunks[stage::pp]) for stage in range(pp))
        return cls(stages, mtp_num_layers="".join(rows).count("m"))


def _layers_per_stage(
    num_layers: int, pp: int, first: int | None, last: int | None, least: int = 0
) -> list[int]:
    """The layers of each stage, at least so many; the first and the last may have their own number.
    Source: `get_num_layers_to_build`, and `select_pipeline_segment` of hybrid models."""
    ends = [n for n in (first, last) if n is not None]
    stages, layers = pp - len(ends), num_layers - sum(ends)
    each = layers // stages if stages > 0 else 0
    if stages < 0 or each * stages != layers or min([each] * (stages > 0) + ends) < least:
        raise PipelineError(
            f"{layers} of {num_layers} layers cannot be divided evenly among {stages} of {pp} "
            "stages. (An embedding or a loss in the split counts as a layer.) Change the number of "
            "layers, of stages, or of layers on the first or last stage, or place every layer: by "
            "pipeline_model_parallel_layout, or by | in a hybrid_layer_pattern."
        )
    return [n for n in (first, *[each] * stages, last) if n is not None]


def _rows_of_stages(layers: Sequence[int], vp: int, embedding: bool, loss: bool) -> list[str]:
    """The symbols of every chunk in model order, from the number of layers per stage."""
    for number in layers:
        if number % vp:
            raise PipelineError(
                f"{number} layers of a stage cannot be divided evenly among {vp} chunks. Change "
                "the number of layers, stages or chunks, or give a pipeline_model_parallel_layout."
            )
    rows = ["t" * (number // vp) for number in layers] * vp
    for what, at, counts in (("embedding", 0, embedding), ("loss", -1, loss)):
        if counts and not rows[at]:
            raise PipelineError(
                f"account_for_{what}_in_pipeline_split leaves no place for the {what}: its chunk "
                "has no layer to give up. Use fewer stages or chunks."
            )
        rows[at] = rows[at][counts:]
    return rows


def _symbol(name: str) -> str:
    try:
        return _SYMBOL_OF_NAME[name.strip().lower()]
    except KeyError:
        raise PipelineError(
            f"Unknown layer {name!r} in a layout list. Known: {', '.join(_SYMBOL_OF_NAME)}."
        ) from None


def _unroll(text: str) -> str:
    """Write out `*n`: first of parentheses, then of single symbols."""

    def repeat(match: re.Match[str]) -> str:
        part, count = match[1], int(match[2])
        if len(part) * count > _MAX_LAYOUT_LENGTH:
            raise PipelineError(
                f"{match[0]!r} in layout {text!r} is more than {_MAX_LAYOUT_LENGTH} symbols."
            )
        return part * count

    flat = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        flat = re.sub(pattern, repeat, flat)
    if unknown := sorted(set(flat) - set("EtmL|")):
        raise PipelineError(
            f"Layout {text!r} has {' '.join(unknown)!r} where only E (embedding), t (layer), "
            "m (MTP depth), L (loss), | (next chunk), *n, (…)*n and commas may stand."
        )
    return flat


def _check_rows(rows: Sequence[str], pp: int, vp: int | None) -> None:
    """Refuse what Megatron's `validate_layer_layout` refuses."""
    flat = "".join(rows)
    shown = f"Layout {'|'.join(rows)!r}"
    if len(rows) % pp or (vp is not None and len(rows) != pp * vp):
        asked = f"{pp} stages" + ("" if vp is None else f" of {vp} chunks")
        raise PipelineError(f"{shown} has {len(rows)} chunks, which do not make {asked}.")
    check_chunks(pp, len(rows) // pp)
    if not re.fullmatch("Et+m*L", flat):
        raise PipelineError(
            f"{shown} must have one E first, then t (at least one), then m, then one L last."
        )
    with_mtp = [position for position, row in enumerate(rows) if "m" in row]
    if len(with_mtp) > 1 or (with_mtp and with_mtp[0] < len(rows) - pp):
        raise PipelineError(
            f"{shown} must have all MTP depths (m) in one chunk, the last chunk of its stage."
        )


def check_at_least(least: int, **values: int) -> None:
    """Raise PipelineError, with the name, if one of the values is below `least`."""
    for name, value in values.items():
        if value < least:
            raise PipelineError(f"{name} is {value}; it must be at least {least}.")


def check_chunks(pp: int, vp: int) -> None:
    """Raise PipelineError for several chunks (vp) on a single stage (pp)."""
    if vp > 1 and pp == 1:
        raise PipelineError(
            f"Asked for {vp} chunks on a single stage: Megatron interleaves only between two or "
            "more stages. Use one chunk or more stages."
        )
