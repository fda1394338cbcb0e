"""Small random problems of several stages, and the shortest step of each by trying all choices.

Which choices fit, and how long they take, is asked of the package, whose answers other tests check
against their definitions. Nothing here searches: every choice of every stage is tried, and every
combination replayed by the definition.
"""

import itertools
import math
import random
from dataclasses import replace

from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.peak_memory import (
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    Imbalance,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StageRecord,
    StaticBytes,
)
from tests.planner.definitions import finish_by_plain_replay

ONE_CHUNK = ((2, 1), (3, 1), (4, 1))
SEVERAL_CHUNKS = ((2, 2), (2, 3), (3, 2))
CHOICES = ("none", "selective[core_attn]", "selective[mlp]", "full")


def random_step(seed, shapes, most_layers=None):
    """A planner and a budget for every stage; of so many layers a chunk at most.

    Among them: choices that take no time, forwards that all choices share and such that they do
    not, measured checkpoints of two layers, residuals, uneven routing.
    """
    rng, problem = _without_budgets(seed, shapes, most_layers)
    return problem, _budgets(rng, problem)


def _without_budgets(seed, shapes, most_layers):
    rng = random.Random(seed)
    pp, vp = rng.choice(shapes)
    layers = pp * vp * rng.randint(1, most_layers or (1 if pp * vp > 4 else 2))
    owner = [rng.randrange(2) for _ in range(layers)]
    kinds = tuple(
        _kind(rng, f"kind{k}", tuple(i for i in range(layers) if owner[i] == k)) for k in range(2)
    )
    profile = Profile(
        Model("random", layers),
        Parallelism(micro_batch_size=1, seq_length=8),
        kinds,
        embedding=_record(rng, "none", rng.randint(0, 3), rng.randint(0, 3)),
        head=_record(rng, "none", rng.randint(0, 3), rng.randint(0, 6)),
        boundary_bytes=rng.randint(0, 2),
        embedding_static=StaticBytes(1),
        head_static=StaticBytes(1),
        deallocate_pipeline_outputs=rng.random() < 0.7,
    )
    layout = Layout.from_flags(layers, pp, vp)
    if rng.random() < 0.4:
        profile = replace(profile, stages=tuple(_stage(rng, chunks) for chunks in layout.stages))
    m = pp * rng.randint(1, 3) if vp > 1 else rng.randint(1, 8)
    group = rng.choice([None, pp + 1]) if vp > 1 and m == 2 * pp + 2 else None
    return rng, Problem(profile, layout, Schedule(pp, vp, m, group), percentile=99.0)


def realistic_step(seed, shapes, most_layers=None):
    """As measured: recompute in the backward alone, forwards nearly equal, no residuals."""
    rng = random.Random(seed)
    _, problem = _without_budgets(seed, shapes, most_layers)
    table = {
        "none": (1.0, 2.0, 100, 10),
        "full": (1.0, 3.0, 4, 90),
        "selective[core_attn]": (1.0, 2.3, 40, 30),
        "selective[mlp]": (1.0, 2.4, 70, 40),
    }
    kinds = []
    for kind in problem.profile.kinds:
        size, speed = rng.uniform(0.7, 1.3), rng.uniform(0.7, 1.3)
        choices = []
        for record in kind.choices:
            if record.choice not in table:
                continue
            forward, backward, held, transient = table[record.choice]
            noise = rng.uniform(0.97, 1.03)
            choices.append(
                replace(
                    record,
                    held_bytes=round(size * held),
                    forward_transient_bytes=round(size * transient / 3),
                    backward_transient_bytes=round(size * transient),
                    forward_ms=round(speed * forward, 6),
                    backward_ms=round(speed * backward * noise, 6),
                )
            )
        kinds.append(replace(kind, choices=tuple(choices)))
    profile = replace(problem.profile, kinds=tuple(kinds), stages=())
    problem = replace(problem, profile=profile)
    return problem, _budgets(rng, problem)


def _budgets(rng, problem):
    needs = zip(problem.stages.leanest, problem.stages.fastest, strict=True)
    return [
        low.peak_bytes + round((high.peak_bytes - low.peak_bytes) * rng.random())
        for low, high in needs
    ]


def _record(rng, choice, forward_ms, backward_ms):
    return ChoiceRecord(
        choice,
        held_bytes=rng.randint(1, 12),
        forward_transient_bytes=rng.randint(0, 9),
        backward_transient_bytes=rng.randint(0, 12),
        forward_ms=float(forward_ms),
        backward_ms=float(backward_ms),
        input_kept=rng.random() < 0.7,
    )


def _kind(rng, name, layers):
    names = sorted(rng.sample(CHOICES, rng.randint(2, 4)), key=CHOICES.index)
    same = rng.randint(0, 3) if rng.random() < 0.4 else None
    least = rng.randint(same or 0, 6)
    more = {
        "none": 0,
        "selective[core_attn]": rng.randint(0, 4),
        "selective[mlp]": rng.randint(0, 4),
    }
    more["full"] = max(more.values()) + rng.randint(0, 4)
    records = []
    for choice in names:
        total = least + more[choice]
        forward = rng.randint(0, min(total, 5)) if same is None else same
        records.append(_record(rng, choice, forward, total - forward))
    if {"none", "full"} <= set(names) and rng.random() < 0.4:
        forward = rng.randint(0, 2 * (least + more["full"]))
        backward = 2 * (least + more["full"]) - forward + rng.randint(0, 2)
        records.append(_record(rng, "full/2", forward, backward))
    uneven = (Imbalance(99.0, 1.25),) if rng.random() < 0.3 else ()
    return LayerKind(name, layers, tuple(records), imbalance=uneven, static=StaticBytes(1))


def _stage(rng, chunks):
    layers = tuple(layer for chunk in chunks for layer in chunk.layers)
    return StageRecord(
        layers,
        StaticBytes(rng.randint(0, 5)),
        residual_bytes=rng.randint(-3, 3),
        residual_ms=rng.choice([0.0, rng.uniform(-2, 2)]),
    )


def shortest_step_ps(problem, budgets, most=4000):
    """Of all policies that fit; None where a stage's, or combinations, are more than `most`."""
    sizes = [
        math.prod(len(chunk_options(problem, chunk)) for chunk in chunks)
        for chunks in problem.layout.stages
    ]
    if max(sizes) > most:
        return None
    stages = [stage_times(problem, stage, budget) for stage, budget in enumerate(budgets)]
    if math.prod(map(len, stages)) > most:
        return None
    return min(map(lambda one: step_ps(problem.schedule, one), itertools.product(*stages)))


def step_ps(schedule, times):
    """Of forwards and backwards, `[stage][direction][chunk]`."""
    return max(finish_by_plain_replay(schedule, *zip(*times, strict=True)))


def stage_times(problem, stage, budget):
    """Forwards and backwards, whole picoseconds, of all choices of a stage that fit.

    An event that takes longer makes no step shorter: so without those that are nowhere shorter.
    """
    residual = residual_times(CostTable(problem.profile), problem.layout)
    base = stage_base(problem.profile, problem.layout, stage, "high")
    moments = stage_moments(problem.profile, problem.schedule, stage)
    chunks = problem.layout.stages[stage]
    found = set()
    for options in itertools.product(*(chunk_options(problem, chunk) for chunk in chunks)):
        columns = [ChunkColumns(chunk, own[0]) for chunk, own in zip(chunks, options, strict=True)]
        if stage_peak(base, stage, columns, moments).bytes <= budget:
            found.add(
                tuple(
                    tuple(
                        max(0, own[1 + direction] + int(added[stage][c]))
                        for c, own in enumerate(options)
                    )
                    for direction, added in enumerate((residual.forward, residual.backward))
                )
            )
    return undominated(found)


def undominated(times):
    """Those that no other is nowhere longer than."""
    flat = {one: (*one[0], *one[1]) for one in times}
    return sorted(
        one
        for one in times
        if not any(
            other != one and all(a <= b for a, b in zip(flat[other], flat[one], strict=True))
            for other in times
        )
    )


def chunk_options(problem, chunk):
    """(units with their bytes, forward and backward in picoseconds) of all choices of a chunk."""
    high = CostTable(problem.profile, problem.imbalance_percentile, "high")
    found = []
    for policies in _covers(problem, chunk.layers):
        layers = [NONE] * problem.profile.num_layers
        for layer, policy in zip(chunk.layers, policies, strict=True):
            layers[layer] = policy
        units = high.chunk_units(chunk, RecomputePolicy(tuple(layers)))
        found.append((units, sum(u.forward_ps for u in units), sum(u.backward_ps for u in units)))
    return found


def _covers(problem, layers):
    if not layers:
        yield ()
        return
    names = {r.choice for r in problem.profile.kind_of(layers[0]).choices}
    firsts = [(LayerPolicy.parse(name),) for name in sorted(names - {"full/2"})]
    groupable = [
        {"none", "full"} <= {r.choice for r in problem.profile.kind_of(layer).choices}
        for layer in layers
    ]
    for size in range(2, len(layers) + 1):
        if all(groupable[:size]):
            firsts.append((LayerPolicy("full", group=size),) * size)
    for first in firsts:
        for rest in _covers(problem, layers[len(first) :]):
            yield first + rest
