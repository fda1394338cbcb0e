"""The order in which megatron-core 0.16.1 and 0.19.2 run forwards and backwards on every stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.layout import Layout, check_at_least, check_chunks

Direction = Literal["forward", "backward"]
MOST_MICROBATCHES = 1 << 40
"""Limit on a step's microbatches. Counts of events then fit in 64 bits by far."""
MOST_IN_GROUPS = 1 << 11
"""Limit on the forwards of a group of microbatches in all chunks, all of which are in flight."""
_GROUPS = 5
"""Groups of microbatches after which a long schedule shows no new moment."""
_SETTLED = 3
"""Groups after whose backwards every moment of the steady state has occurred once."""


class Event(NamedTuple):
    """The forward or backward of one chunk for one microbatch, on one stage."""

    direction: Direction
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings that determine the order of events on every stage.

    With one chunk per stage it is 1F1B (on one stage, no pipelining), with several interleaved
    1F1B. Source: `forward_backward_*`, `get_pp_rank_microbatches`, `get_schedule_table` in
    `schedules.py` and `combined_1f1b.py` of megatron-core. Raises PipelineError for settings that
    Megatron refuses.
    """

    num_stages: int
    """Pipeline-parallel size."""
    num_chunks: int
    """Chunks of each stage."""
    num_microbatches: int
    """Microbatches of a step on one data-parallel rank."""
    microbatch_group_size: int | None = None
    """Megatron's `microbatch_group_size_per_vp_stage`: microbatches that pass one chunk before the
    next chunk runs. None means `num_stages`. It has no effect with one chunk per stage."""
    overlap_moe_expert_parallel_comm: bool = False
    """Whether a forward and the backward after it run side by side, after one more warm-up
    forward."""

    @classmethod
    def of_layout(cls, layout: Layout, num_microbatches: int, **settings: Any) -> Schedule:
        """The schedule of a layout's stages and chunks, with other settings by name."""
        return cls(layout.num_stages, layout.num_chunks, num_microbatches, **settings)

    def __post_init__(self) -> None:
        check_at_least(
            1,
            num_stages=self.num_stages,
            num_chunks=self.num_chunks,
            num_microbatches=self.num_microbatches,
        )
        if self.num_microbatches > MOST_MICROBATCHES:
            raise PipelineError(
                f"num_microbatches is {self.num_microbatches}; at most {MOST_MICROBATCHES} are "
                "planned. Ask for fewer."
            )
        check_chunks(self.num_stages, self.num_chunks)
        if self.num_chunks > 1:
            self._check_groups()
        elif self.overlap_moe_expert_parallel_comm and self.num_stages > 1:
            raise PipelineError(
                f"overlap_moe_expert_parallel_comm on {self.num_stages} stages needs interleaving: "
                "found one chunk per stage. Ask for two or more, or turn the overlap off."
            )

    def _check_groups(self) -> None:
        p, m, group = self.num_stages, self.num_microbatches, self.group_size
        if not p <= group <= m:
            raise PipelineError(
                f"The microbatch group size is {group}; interleaved, it must lie between the "
                f"number of stages {p} and of microbatches {m}. Change either."
            )
        if group * self.num_chunks > MOST_IN_GROUPS:
            raise PipelineError(
                f"Groups of {group} microbatches in {self.num_chunks} chunks put "
                f"{group * self.num_chunks} in flight; at most {MOST_IN_GROUPS} are planned. "
                "Choose a smaller group size."
            )
        if 0 < m % group < p:
            raise PipelineError(
                f"{m} microbatches in groups of {group} leave a last group of {m % group}, fewer "
                f"than the {p} stages. Choose a group size that leaves none, or at least {p}."
            )

    @property
    def group_size(self) -> int:
        """Microbatches that pass one chunk in a row."""
        return self.num_stages if self.microbatch_group_size is None else self.microbatch_group_size

    @property
    def runs_head_alone(self) -> bool:
        """Whether the backward of a microbatch follows its forward in the chunk with the head, so
        that no other one is in flight there."""
        uneven = self.num_chunks > 1 and self.num_microbatches % self.group_size > 0
        return not uneven and not self.overlap_moe_expert_parallel_comm

    def warmup(self, stage: int) -> int:
        """Return how many forwards the stage runs before forwards and backwards alternate.

        Source: `get_pp_rank_microbatches`; on one stage with EP overlap,
        `combined_1f1b_schedule_for_no_pipelining`.
        """
        if not 0 <= stage < self.num_stages:
            raise PipelineError(
                f"Stage {stage} does not exist: stages are 0 to {self.num_stages - 1}."
            )
        wanted = self.stride * (self.num_stages - 1 - stage) + self.warmup_of_last_stage
        return min(wanted, self.num_microbatches * self.num_chunks)

    @property
    def stride(self) -> int:
        """How many more forwards a stage's warm-up has than the next stage's."""
        return 1 if self.num_chunks == 1 else 2

    @property
    def warmup_of_last_stage(self) -> int:
        """How many forwards the last stage's warm-up would have if there were enough."""
        return (self.num_chunks - 1) * self.group_size + self.overlap_moe_expert_parallel_comm

    def shortened(self) -> Schedule:
        """A schedule of fewer microbatches that has the same moments; itself if there are few.

        Its steady state is long enough to repeat once, and its last group has the same size.
        """
        v, m = self.num_chunks, self.num_microbatches
        size = self.group_size if v > 1 else 1
        # The longest warm-up is shorter than two groups of all chunks, or one microbatch per stage.
        whole = _GROUPS if v > 1 else self.num_stages + _GROUPS
        return replace(self, num_microbatches=min(m // size, whole) * size + m % size)

    def left_out(self, stage: int) -> list[int]:
        """For each event of the shortened schedule how many of the microbatches that it leaves out
        come before."""
        short = self.shortened()
        size = self.group_size if self.num_chunks > 1 else 1
        # What is there for the first time later than this is there because the schedule ends.
        once = short.warmup(stage) + 2 * _SETTLED * size * self.num_chunks
        events = 2 * short.num_microbatches * short.num_chunks
        more = self.num_microbatches - short.num_microbatches
        return [more if event >= once else 0 for event in range(events)]

    def table(self) -> list[tuple[int, int]]:
        """Microbatch and chunk of every forward in order, the same on each stage. Source:
        `get_schedule_table`."""
        v, m = self.num_chunks, self.num_microbatches
        size = self.group_size if v > 1 else m
        return [
            (microbatch, chunk)
            for start in range(0, m, size)
            for chunk in range(v)
            for microbatch in range(start, min(start + size, m))
        ]

    def events(self, stage: int) -> tuple[Event, ...]:
        """Return everything the stage does in a step, in order."""
        table, warmup, last = self.table(), self.warmup(stage), self.num_chunks - 1
        forwards = [Event("forward", chunk, microbatch) for microbatch, chunk in table]
        backwards = [Event("backward", last - chunk, microbatch) for microbatch, chunk in table]
        pairs = zip(forwards[warmup:], backwards, strict=False)
        return *forwards[:warmup], *chain(*pairs), *backwards[len(table) - warmup :]
