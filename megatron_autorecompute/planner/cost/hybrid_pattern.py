"""Reads the layer pattern of a HybridModel, such as `M-M*|-ME/*E`.

One symbol is one layer. `|` separates pipeline chunks in model order, `/` begins a depth of
multi-token prediction. Source: `Symbols`, `parse_hybrid_pattern` and `select_pipeline_segment` in
megatron-core's models/hybrid/hybrid_layer_allocation.py, the same in 0.19.2 and main of 2026-08.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megatron_autorecompute.errors import PipelineError

FAMILIES = {
    "M": "mamba",
    "G": "gdn",
    "*": "attention",
    "D": "dsa",
    "+": "mla",
    "-": "mlp",
    "E": "moe",
}
"""Family of a layer by its symbol."""
_MOST_SYMBOLS = 100_000


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """The layers, stages and MTP depths that a layer pattern describes."""

    segments: tuple[str, ...]
    """Symbols of every pipeline chunk in model order; a single one if there is no `|`."""
    depth: str = ""
    """Symbols of one depth of multi-token prediction: a stack of its own inside the depth."""
    mtp_num_layers: int = 0
    """How many depths there are."""

    @property
    def symbols(self) -> str:
        """Symbols of the decoder; layer i is symbol i."""
        return "".join(self.segments)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.symbols)

    @property
    def families(self) -> tuple[str, ...]:
        """Family of every decoder layer."""
        return tuple(FAMILIES[symbol] for symbol in self.symbols)

    def __str__(self) -> str:
        return "/".join(["|".join(self.segments), *[self.depth] * self.mtp_num_layers])

    @classmethod
    def parse(cls, text: str) -> HybridPattern:
        """Read Megatron's `hybrid_layer_pattern`; PipelineError, with position and symbol, for what
        Megatron refuses and for a pattern without layers."""
        shown = f"hybrid_layer_pattern {text!r:.200}"
        if len(text) > _MOST_SYMBOLS:
            raise PipelineError(f"{shown} has more than {_MOST_SYMBOLS} symbols.")
        main, *depths = text.split("/")
        _check_symbols(shown, text, len(main))
        _check_attention(shown, main, 0)
        if not any(depths):  # as Megatron does
            depths = []
        if depths:
            _check_attention(shown, depths[0], len(main) + 1)
            other = next((depth for depth in depths if depth != depths[0]), None)
            if other is not None:
                raise PipelineError(
                    f"{shown}: MTP depth {depths.index(other)} is {other!r}, and depth 0 is "
                    f"{depths[0]!r}: Megatron builds all depths alike. Write the same."
                )
        pattern = cls(tuple(main.split("|")), "".join(depths[:1]), len(depths))
        if not pattern.num_layers:
            raise PipelineError(f"{shown} has no layers before the first /. Give at least one.")
        return pattern

    def placed(self, chunks: Sequence[Sequence[int]]) -> HybridPattern:
        """This pattern with `|` between these chunks, in model order (MTP depths ignored)."""
        counts = (sum(index < self.num_layers for index in chunk) for chunk in chunks)
        symbols = iter(self.symbols)
        return replace(self, segments=tuple("".join(islice(symbols, n)) for n in counts))

    def check_numbers(self, num_layers: int, mtp_num_layers: int) -> HybridPattern:
        """This pattern; PipelineError if a config's two numbers differ from its symbols."""
        own = (self.num_layers, self.mtp_num_layers)
        if own != (num_layers, mtp_num_layers):
            raise PipelineError(
                f"hybrid_layer_pattern {str(self)!r:.200} has {own[0]} layers and {own[1]} MTP "
                f"depths (after /); num_layers is {num_layers}, mtp_num_layers {mtp_num_layers}. "
                "Set them to these, or correct the pattern."
            )
        return self

    def check_segments(self, pp: int, vp: int | None = None) -> None:
        """Raise PipelineError if the segments do not make `pp` stages (of `vp` chunks)."""
        count = len(self.segments)
        if count % pp or (vp is not None and count != pp * vp):
            asked = f"{pp} stages" + ("" if vp is None else f" of {vp} chunks")
            number = f"a multiple of {pp}" if vp is None else str(pp * vp)
            raise PipelineError(
                f"hybrid_layer_pattern {str(self)!r:.200} has {count} segments, separated by |, "
                f"which do not make {asked}. Write {number}."
            )


def pattern_of_job(facts: Mapping[str, Any]) -> HybridPattern | None:
    """The pattern in `Model.facts` of a profile, of the model that was measured or the job that was
    described; None if it is no hybrid model's."""
    job = facts.get("job")
    config = job.get("config") if isinstance(job, dict) else facts
    text = config.get("hybrid_layer_pattern") if isinstance(config, dict) else None
    return HybridPattern.parse(text) if isinstance(text, str) else None


def check_flags(args: Any) -> None:
    """Check the pattern in parsed flags of Megatron-LM, whose own error names the symbol alone;
    raises as `HybridPattern.parse` and `check_segments`."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        text = getattr(args, name, None)
        if text is not None:
            pattern = HybridPattern.parse(text)
            if len(pattern.segments) > 1:  # else Megatron divides the layers
                pattern.check_segments(args.pipeline_model_parallel_size)


def _check_symbols(shown: str, text: str, main: int) -> None:
    """main: how many symbols are before the first `/`."""
    for position, symbol in enumerate(text):
        if symbol not in ("|/" if position <= main else "/") and symbol not in FAMILIES:
            known = ", ".join(f"{one} {name}" for one, name in FAMILIES.items())
            raise PipelineError(
                f"{shown}: {symbol!r} at position {position} is no layer. Known are {known}; "
                "| ends a chunk before the first /, which begins an MTP depth. Megatron has no "
                "[…] groups."
            )


def _check_attention(shown: str, part: str, start: int) -> None:
    others = [position for position, symbol in enumerate(part) if symbol in "D+"]
    if "*" in part and others:
        raise PipelineError(
            f"{shown}: '*' at position {start + part.index('*')} and {part[others[0]]!r} at "
            f"position {start + others[0]}: Megatron does not build attention beside MLA or DSA "
            "in one model. Use one of them."
        )
