"""The record of a comparison: time and memory of every strategy, on one machine and one budget.

`run` makes records and `rendering` prints them. docs/comparison.md says what a comparison does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from megatron_autorecompute import json_records
from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.options import option
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.work_order import contains, reruns


@dataclass(frozen=True, slots=True)
class NotTried:
    """A setting that was not run."""

    name: str
    """The table's name for it: `block/5`, `selective[core_attn+mlp]`."""
    reason: str
    """A clause: why it cannot be the fastest that fits, or cannot be run."""


def reruns_more(larger: RecomputePolicy, smaller: RecomputePolicy) -> bool:
    """Whether every layer recomputes all that it does under `smaller`, and some layer more."""
    pairs = [pair for pair in zip(larger.layers, smaller.layers, strict=True) if not _equal(*pair)]
    return bool(pairs) and all(contains(*pair) for pair in pairs)


def _equal(one: LayerPolicy, other: LayerPolicy) -> bool:
    """Whether a layer recomputes and offloads the same at both."""
    if "full" in (one.granularity, other.granularity):
        return replace(one, group=1) == replace(other, group=1)
    alike = (one.inner, one.offload) == (other.inner, other.offload)
    return alike and reruns(one) == reruns(other)


def needless(policy: RecomputePolicy, fitting: Mapping[str, RecomputePolicy]) -> str | None:
    """Why a setting need not be run, naming one of `fitting` that recomputes less; else None."""
    smaller = next((name for name, other in fitting.items() if reruns_more(policy, other)), None)
    return None if smaller is None else f"reruns all that {smaller} reruns, which fits, and more"


SCHEMA_VERSION = 1

Family = Literal["none", "selective", "full", "skips", "manual", "ours", "tried"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the training job."""

    num_layers: int = option(12, "transformer layers of the whole model")
    hidden_size: int = option(192, "width of the hidden states")
    num_attention_heads: int = option(12, "attention heads; unfused attention holds bytes for each")
    seq_length: int = option(256, "tokens in a sequence")
    micro_batch_size: int = option(2, "sequences in a microbatch")
    num_microbatches: int = option(4, "microbatches in a step")
    pipeline_stages: int = option(2, "pipeline-parallel size, and the number of processes")
    bf16: bool = option(False, "train in bfloat16 with fp32 master weights; fp32 otherwise")
    seed: int = option(1234, "seed of weights and dropout")
    hybrid_layer_pattern: str | None = option(
        None, "train a HybridModel of these layers, a symbol for each, | between stages"
    )

    def __post_init__(self) -> None:
        """As in Megatron, a pattern says how many layers there are. Raises PipelineError for one
        that Megatron does not build."""
        if self.pattern is not None:
            object.__setattr__(self, "num_layers", self.pattern.num_layers)

    @property
    def pattern(self) -> HybridPattern | None:
        """The parsed pattern of a HybridModel; None for a GPTModel."""
        text = self.hybrid_layer_pattern
        return None if text is None else HybridPattern.parse(text)


ON_A_GPU = Shape(
    num_layers=24,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    micro_batch_size=8,
    pipeline_stages=1,
    bf16=True,
)
"""The default on a GPU. One stage: if a strategy runs out of memory, no other rank waits for it."""


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """What was measured of one strategy."""

    name: str
    """A label: `none`, `full`, `block/3`, `manual: block/3`, `ours`."""

    family: Family
    """The row of the table that it belongs to. `skips` is full without work that no backward reads,
    `manual` the best of the manual search, `tried` everything that the search ran."""

    policy: str
    """The policy, as text for `--recompute-policy`."""

    peak_bytes: tuple[int, ...]
    """The most bytes alive on each pipeline stage during one step, static bytes included."""

    step_ms: tuple[float, ...] = ()
    """Every timed step, in the order run; strategies take turns."""

    search_s: float | None = None
    """Time to find it, measuring included; None if there was no search."""

    predicted_peak_bytes: tuple[int, ...] = ()
    """The plan's prediction per stage; for ours only."""

    predicted_step_ms: float | None = None
    """The plan's prediction; for ours only."""

    out_of_memory: bool = False
    """Whether the device ran out of memory; peaks are then those reached before."""

    @property
    def median_ms(self) -> float | None:
        """Median step time, None before the first timed step."""
        return statistics.median(self.step_ms) if self.step_ms else None

    @property
    def spread_ms(self) -> float:
        """Distance between the quartiles of the step times; 0 for fewer than two."""
        if len(self.step_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_ms, n=4, method="inclusive")
        return high - low


@dataclass(frozen=True, slots=True)
class Comparison:
    """All results of one run of the comparison."""

    budget_bytes: int | None
    """Bytes that each pipeline stage may use; None until none and full have been measured."""

    strategies: tuple[StrategyResult, ...] = ()
    """The strategies in table order, then everything else that the manual search tried."""

    not_tried: tuple[NotTried, ...] = ()
    """Settings that the manual search did not need to run, or could not."""

    complete: bool = False
    """False when the run was cut short; finished strategies are still whole."""

    job: Shape = field(default_factory=Shape)
    """The size of the training job."""

    machine: dict[str, str] = field(default_factory=dict)
    """Device and versions."""

    schema_version: int = SCHEMA_VERSION
    """Major version of this schema."""

    def exceeds(self, strategy: StrategyResult) -> bool:
        """Whether a strategy does not fit the budget."""
        over = self.budget_bytes is not None and max(strategy.peak_bytes) > self.budget_bytes
        return over or strategy.out_of_memory

    def rows(self) -> list[StrategyResult]:
        """The table: none, selective, full, full without dead work, the best manual setting,
        ours."""
        return [strategy for strategy in self.strategies if strategy.family != "tried"]

    def with_result(self, result: StrategyResult) -> Comparison:
        """The comparison with one strategy's result added, or replaced if it has one."""
        every = (*self.strategies, result)
        latest = {(s.family == "tried", s.name): s for s in every}.values()
        order = get_args(Family)
        return replace(self, strategies=tuple(sorted(latest, key=lambda s: order.index(s.family))))

    def save(self, path: str | Path) -> None:
        """Write the record to a file, as a whole or not at all."""
        json_records.write_atomically(json_records.to_json(self), path)

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read a file; raises ProfileError."""
        return json_records.load(cls, path, major=SCHEMA_VERSION)


def read_text(path: Path, shape: Shape) -> bytes:
    """The training text; raises OSError, or MachineError for less than one microbatch."""
    text = path.read_bytes()
    needed = (shape.seq_length + 1) * shape.micro_batch_size
    if len(text) < needed:
        raise MachineError(
            f"The training text has {len(text)} bytes; a microbatch of {shape.micro_batch_size} "
            f"sequences of {shape.seq_length} tokens needs {needed}. Give a longer file with "
            "--text."
        )
    return text
