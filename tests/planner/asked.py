"""Questions about layouts and micro-batches that several tests ask."""

from dataclasses import replace

from megatron_autorecompute.planner.layout import Chunk, Layout
from megatron_autorecompute.profile import ChoiceRecord
from tests.planner.random_profiles import problem_of_many


def uneven(num_layers=7, stages=3, head_ms=25.0):
    profile, _, _, _ = problem_of_many(num_layers)
    head = ChoiceRecord("none", 40, 9, 50, head_ms, 2 * head_ms)
    return replace(profile, head=head), stages


def layout_of(sizes):
    chunks, start = [], 0
    for stage, size in enumerate(sizes):
        layers = tuple(range(start, start + size))
        chunks.append((Chunk(layers, embedding=stage == 0, head=stage == len(sizes) - 1),))
        start += size
    return Layout(tuple(chunks))


def with_micro_batch(profile, size, speedup):
    def grown(r):
        return replace(
            r,
            held_bytes=r.held_bytes * size,
            forward_transient_bytes=r.forward_transient_bytes * size,
            backward_transient_bytes=r.backward_transient_bytes * size,
            forward_ms=r.forward_ms * size / speedup,
            backward_ms=r.backward_ms * size / speedup,
        )

    kinds = tuple(replace(k, choices=tuple(map(grown, k.choices))) for k in profile.kinds)
    shape = replace(profile.parallelism, micro_batch_size=size)
    return replace(profile, kinds=kinds, parallelism=shape)
