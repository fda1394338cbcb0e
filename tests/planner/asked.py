"""Questions about layouts and micro-batches that several tests ask."""

import itertools
from dataclasses import dataclass, replace

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.layout_flags import uneven_layout, uneven_sizes
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.search.manual import manual_policy, manual_settings
from megatron_autorecompute.planner.search.solve import try_solve
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord
from tests.planner.random_profiles import one_chunk_each, problem_of_many


@dataclass
class ManualSetting:
    """One of Megatron's own settings in a problem."""

    name: str
    policy: RecomputePolicy | None = None
    cost: PolicyCost | None = None
    fits: bool = False
    refused: str = ""


def every_manual_setting(problem):
    """All that Megatron offers, each with its cost, or why it is refused or nobody knows."""
    return [_manual_setting(problem, setting) for setting in manual_settings(problem)]


def _manual_setting(problem, setting):
    try:
        policy = manual_policy(problem, setting)
        cost = problem.cost(policy)
    except (PolicyError, ProfileError) as error:
        return ManualSetting(str(setting), refused=str(error))
    pairs = zip(cost.stages, problem.budgets, strict=True)
    fits = all(own.peak_high_bytes <= budget for own, budget in pairs)
    return ManualSetting(str(setting), policy, cost, fits)


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


def partitions(num_layers, stages):
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


def uneven_layouts(shape):
    """Every layout of as many stages and chunks that the flags for uneven stages can give."""
    ends = ((first, last) for first, _, last in uneven_sizes(shape))
    return [own for own in (uneven_layout(shape, *both) for both in ends) if own is not None]


def searched_layouts(stages, chunks, layers, depths):
    """All that a search may answer, and with one chunk a stage any partition."""
    if chunks > 1:
        even = Layout.from_flags(layers, stages, chunks, mtp_num_layers=depths)
        return uneven_layouts(even)
    return [one_chunk_each(sizes, depths) for sizes in partitions(layers, stages)]


def shortest_of_all(problem):
    """The shortest step of the layout and of all that flags can give, each solved; None if none
    fits."""
    layouts = [problem.layout, *uneven_layouts(problem.layout)]
    found = [try_solve(replace(problem, layout=layout)) for layout in layouts]
    return min((own.cost.step_ms for own in found if own is not None), default=None)
