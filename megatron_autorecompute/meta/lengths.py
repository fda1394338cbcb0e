"""Profiles a job whose microbatches differ in length.

The job is profiled at the buckets, and lines go through these. How a loop packs samples decides
which microbatches its calls have.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_autorecompute import json_records
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.lines import Microbatch, RecordLines, envelope
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.planner.search.buckets import BUCKETS, EXAMPLES, LARGEST, bucket
from megatron_autorecompute.profile import ChoiceRecord, LayerKind, Profile

CALLS = 64
"""Simulated calls, drawn from the lengths with a fixed seed."""
CALLS_KEPT = 8
"""The number of these calls whose lengths a profile keeps."""


def lengths_of(job: Job) -> tuple[list[int], list[float]]:
    """Lengths of samples and their weights; the longest alone if the job states none.

    Raises OptionError: a file that cannot be read or is empty, or a length above seq_length.
    """
    given = job.sample_lengths
    if isinstance(given, str):
        found = [(length, 1.0) for length in _read(given)]
        if not found:
            raise OptionError(f"sample_lengths {given}: no line has a length. Write one a line.")
    elif isinstance(given, dict):
        found = [(int(length), weight) for length, weight in given.items()]
    else:
        found = [(length, 1.0) for length in given]
    found = found or [(job.seq_length, 1.0)]
    longest = max(length for length, _ in found)
    if longest > job.seq_length:
        raise OptionError(
            f"{job.name}: sample_lengths go up to {longest:,} tokens, seq_length is "
            f"{job.seq_length:,}. Raise seq_length, which is the longest sample."
        )
    return [length for length, _ in found], [weight for _, weight in found]


def _read(path: str) -> list[int]:
    """The lengths in a JSONL file, of whose lines each is a number or an object with `length`."""
    try:
        lines = json_records.read_text(Path(path)).splitlines()
    except (OSError, ValueError) as error:
        raise OptionError(
            f"Cannot read sample_lengths {path}: {json_records.reason(error)}."
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            length = one["length"] if isinstance(one, dict) else one
        except (ValueError, KeyError):
            length = None
        if type(length) is not int or length < 1:
            raise OptionError(
                f"{path}, line {number}: {line.strip()!r:.80} has no length. Write a number of "
                'tokens, or an object with one, such as {"length": 4096}.'
            )
        found.append(length)
    return found


def packed(samples: list[int], most: int) -> list[int]:
    """Tokens of microbatches, by first fit; a sample above `most` is alone."""
    microbatches: list[int] = []
    for sample in samples:
        at = next((n for n, size in enumerate(microbatches) if size + sample <= most), None)
        if at is None:
            microbatches.append(sample)
        else:
            microbatches[at] += sample
    return microbatches


@dataclass(frozen=True, slots=True)
class Calls:
    """Simulated calls of a loop."""

    shares: dict[int, float]
    """The share of calls by the bucket of their largest microbatch, in tokens on a rank."""
    num_microbatches: int
    """The median."""
    examples: tuple[tuple[int, ...], ...]
    """Tokens of each microbatch in some calls, on the rank with the most tokens."""


def simulated(job: Job) -> Calls:
    """Calls in which every rank takes its part of the global batch, and packs it.

    Raises OptionError: as `lengths_of`, or a sample longer than the microbatches that are planned
    for.
    """
    lengths, weights = lengths_of(job)
    cap, split = job.max_tokens_per_microbatch, job.size("context")
    if max(lengths) > cap * split:
        raise OptionError(
            f"{job.name}: samples have up to {max(lengths):,} tokens, and a microbatch up to "
            f"{cap * split:,} (max_tokens_per_microbatch {cap:,} x {split} context parallel "
            "ranks), for which plans are made. Raise it, or give sample_lengths without longer "
            "ones (without sample_lengths all have seq_length)."
        )
    own = max(1, job.global_batch_size // job.data_parallel)
    draw = random.Random(0)
    largest: Counter[int] = Counter()
    counts = []
    examples = []
    for _ in range(CALLS):
        ranks = [
            packed(draw.choices(lengths, weights, k=own), cap * split)
            for _ in range(job.data_parallel)
        ]
        most = max(tokens for rank in ranks for tokens in rank)
        largest[bucket(-(-most // split), cap)] += 1
        counts.append(max(map(len, ranks)))
        examples.append(tuple(-(-tokens // split) for tokens in max(ranks, key=sum)))
    shares = {tokens: calls / CALLS for tokens, calls in sorted(largest.items())}
    return Calls(shares, sorted(counts)[CALLS // 2], tuple(examples[:CALLS_KEPT]))


def profile_lengths(job: Job, profile_one: Callable[[Job], Profile]) -> Profile:
    """The profile at max_tokens_per_microbatch, with lines, and with what calls to expect;
    `profile_one` profiles a job of one length."""
    calls = simulated(job)
    microbatches = calls.num_microbatches
    cap, split = job.max_tokens_per_microbatch, job.size("context")
    stages = job.size("pipeline")
    if job.resolved.virtual_pipeline_model_parallel_size:
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
        lines = replace(
            lines,
            kept_level_bytes=line(
                lambda record: (
                    record.held_bytes
                    + record.backward_transient_bytes
                    + (record.kept_gradient_bytes or 0)
                )
            ),
        )
    return replace(seen[-1][1], lines=lines)
