"""Profiles a job whose microbatches differ in length: at the buckets, with lines through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_autorecompute.lines import Microbatch, RecordLines, envelope
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.packing import simulated
from megatron_autorecompute.planner.search.buckets import BUCKETS, EXAMPLES, LARGEST
from megatron_autorecompute.profile import ChoiceRecord, LayerKind, Profile


def profile_lengths(job: Job, profile_one: Callable[[Job], Profile]) -> Profile:
    """The profile at max_tokens_per_microbatch, with lines, and with what calls to expect.

    Args:
        job: one with max_tokens_per_microbatch.
        profile_one: profiles a job of one length.
    """
    calls = simulated(job)
    microbatches = calls.num_microbatches
    cap, split = job.max_tokens_per_microbatch, job.size("context")
    stages = job.size("pipeline")
    if job.config.get("virtual_pipeline_model_parallel_size"):
        microbatches = -(-microbatches // stages) * stages
    unit = 2 * split * job.size("tensor")  # what Megatron divides a sequence by

    def at(share: float) -> Job:
        tokens = -(-round(cap * split * share) // unit) * unit
        batch = microbatches * job.data_parallel
        one = replace(job, seq_length=tokens, micro_batch_size=1, global_batch_size=batch)
        return replace(one, max_tokens_per_microbatch=0, sample_lengths=[], packed_samples=True)

    jobs = [at(share) for share in BUCKETS]
    seen = [(Microbatch.longest(one.seq_length // split), profile_one(one)) for one in jobs]
    whole = seen[-1][1]
    facts = {
        **whole.model.facts,
        LARGEST: {str(tokens): part for tokens, part in calls.shares.items()},
        EXAMPLES: [" ".join(map(str, lengths)) for lengths in calls.examples],
    }
    return replace(
        whole,
        model=replace(whole.model, facts=facts),
        kinds=tuple(_kind(number, seen) for number in range(len(whole.kinds))),
        embedding=_record([(one, found.embedding) for one, found in seen]),
        head=_record([(one, found.head) for one, found in seen]),
        final_norm=whole.final_norm
        and _record([(one, found.final_norm) for one, found in seen if found.final_norm]),
        boundary_line=envelope([(one, found.boundary_bytes) for one, found in seen]),
        assumptions=(*whole.assumptions, _assumed(job, microbatches)),
    )


def _assumed(job: Job, microbatches: int) -> str:
    return (
        f"Samples of different lengths are packed by first fit into microbatches of up to "
        f"{job.max_tokens_per_microbatch:,} tokens on a rank, {microbatches} a call (median of "
        "simulated calls); figures between and above the profiled lengths follow lines."
    )


def _kind(number: int, seen: Sequence[tuple[Microbatch, Profile]]) -> LayerKind:
    kind = seen[-1][1].kinds[number]
    choices = []
    for record in kind.choices:
        found = [(one, each.kinds[number].record(record.choice)) for one, each in seen]
        choices.append(_record([(one, own) for one, own in found if own is not None]))
    return replace(kind, choices=tuple(choices))


def _record(seen: Sequence[tuple[Microbatch, ChoiceRecord]]) -> ChoiceRecord:
    def line(figure: Callable[[ChoiceRecord], float]) -> Any:
        return envelope([(one, figure(record)) for one, record in seen])

    lines = RecordLines(
        line(lambda record: record.held_bytes),
        line(lambda record: record.held_bytes + record.forward_transient_bytes),
        line(lambda record: record.held_bytes + record.backward_transient_bytes),
        line(lambda record: record.forward_ms),
        line(lambda record: record.backward_ms),
    )
    if all(record.kept_gradient_bytes is not None for _, record in seen):
        lines = replace(lines, kept_level_bytes=line(_kept_level))
    return replace(seen[-1][1], lines=lines)


def _kept_level(record: ChoiceRecord) -> float:
    return record.held_bytes + record.backward_transient_bytes + (record.kept_gradient_bytes or 0)
