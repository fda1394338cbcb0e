"""A forward beside a backward, against a plain walk through both and a brute force of choices."""

import itertools
import random
from dataclasses import replace

from megatron_autorecompute.planner.cost import overlap
from megatron_autorecompute.planner.cost.peak_memory import ChunkColumns
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.stage_problem import HELD
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import PartBytes
from tests.planner.random_profiles import drawn


def overlapped(seed):
    """A problem on one stage, of records with and without parts; no checkpoints of several."""
    rng = random.Random(f"beside {seed}")
    seeds = (s for s in itertools.count(seed * 1000) if drawn(s)[2].num_stages == 1)
    profile, layout, schedule, budget = drawn(next(seeds))
    kinds = tuple(
        replace(
            kind,
            choices=tuple(
                in_parts(rng, r, profile.boundary_bytes) if rng.random() < 0.7 else r
                for r in kind.choices
            ),
        )
        for kind in profile.kinds
    )
    schedule = Schedule(1, 1, schedule.num_microbatches + 1, overlap_moe_expert_parallel_comm=True)
    return replace(profile, kinds=kinds, stages=()), layout, schedule, budget + 20


def in_parts(rng, record, boundary_bytes):
    """The record with four parts, whose highest points and end are its own."""
    held = record.held_bytes
    forward = max(record.forward_transient_bytes, boundary_bytes)
    backward = max(record.backward_transient_bytes, 2 * boundary_bytes + 2)
    ends = [[rng.randint(0, held + most) for _ in range(4)] for most in (forward, backward)]
    ends[0][3], ends[1][0] = held + boundary_bytes, 2 * boundary_bytes + rng.randint(0, 2)
    peaks = [
        [rng.randint(end, held + most) for end in each]
        for each, most in zip(ends, (forward, backward), strict=True)
    ]
    peaks[0][rng.randrange(4)], peaks[1][rng.randrange(4)] = held + forward, held + backward
    columns = zip(peaks[0], ends[0], peaks[1], ends[1], strict=True)
    return replace(
        record,
        forward_transient_bytes=forward,
        backward_transient_bytes=backward,
        parts=tuple(PartBytes(*column) for column in columns),
        input_stays=rng.random() < 0.5,
        output_keeps_bytes=rng.randint(0, 3),
    )


def walked(units, boundary, head):
    """The highest bytes of both, in the order of TransformerModelChunkSchedulePlan.run."""
    layers = [u for u in units if u.layers or u.name == "final norm"]
    norm = next((u for u in layers if not u.layers), None)
    before = [u for u in units[: units.index(layers[0])]]
    after = units[units.index(layers[-1]) + 1 :]
    layers = [u for u in layers if u.layers]
    depth = next((i for i, u in enumerate(layers) if norm and i == norm_at(units, norm)), None)
    alive_f, alive_b, left, high = 0, sum(u.held_bytes for u in units), {}, 0
    for unit in before:
        alive_f += unit.held_bytes
        high = max(high, alive_f + unit.forward_transient_bytes + alive_b)
    in_f = boundary
    for unit in reversed(after):
        high = max(high, alive_f + in_f + alive_b + unit.backward_transient_bytes)
        alive_b -= unit.held_bytes
    in_b, gradient, normed = boundary, 0, boundary * (head and norm is None)
    for i, f in enumerate(layers):
        j = len(layers) - 1 - i
        b = layers[j]
        held_f = f.held_bytes + (norm.held_bytes if i == depth else 0)
        held_b = b.held_bytes + (norm.held_bytes if j == depth else 0)
        alive_b -= held_b
        four_f, four_b = (
            four(f, boundary, norm if i == depth else None),
            four(b, boundary, norm if j == depth else None),
        )
        above = j + 1 < len(layers) and layers[j + 1].input_stays
        for who, part in zip("bfbfbffb", (3, 0, 2, 1, 1, 2, 3, 0), strict=True):
            rest = alive_f + alive_b + gradient + sum(left.values())
            if who == "f":
                more = normed if (i, part) == (len(layers) - 1, 3) else 0
                high = max(high, rest + four_f[part].forward_peak_bytes + more + in_b)
                in_f = four_f[part].forward_end_bytes + more
                left.pop(i, None)
            else:
                more = normed if (i, part) == (0, 3) else 0
                high = max(high, rest + four_b[part].backward_peak_bytes + more + in_f)
                in_b = four_b[part].backward_end_bytes
            if (who, part) in (("b", 3), ("b", 0)) and above and j + 1 in left:
                left[j + 1] += boundary  # this layer's output, and its gradient
        if j > i:
            left[j] = in_b - 2 * boundary
        alive_f, in_f, in_b = alive_f + held_f, boundary, 2 * boundary
        gradient = 0 if head else boundary + layers[-1].output_keeps_bytes
    for unit in after:
        alive_f += unit.held_bytes
        high = max(high, alive_f + unit.forward_transient_bytes + alive_b + in_b + gradient)
        in_f = 0
    for unit in reversed(before):
        alive = alive_f + in_f + alive_b + gradient + boundary
        high = max(high, alive + unit.backward_transient_bytes)
        alive_b -= unit.held_bytes
    return high


def norm_at(units, norm):
    return sum(1 for u in units[: units.index(norm)] if u.layers) - 1


def four(unit, boundary, norm):
    forward = unit.held_bytes + unit.forward_transient_bytes
    backward = unit.held_bytes + unit.backward_transient_bytes
    whole = PartBytes(forward, forward, backward, backward)
    found = unit.parts or (
        replace(whole, backward_end_bytes=2 * boundary),
        whole,
        whole,
        replace(whole, forward_end_bytes=unit.held_bytes + boundary),
    )
    if norm is None:
        return found
    held, last = unit.held_bytes + norm.held_bytes, found[3]
    return (
        *found[:3],
        PartBytes(
            max(last.forward_peak_bytes, held + norm.forward_transient_bytes),
            last.forward_end_bytes + norm.held_bytes,
            max(last.backward_peak_bytes, held + norm.backward_transient_bytes),
            last.backward_end_bytes,
        ),
    )


def every_policy(profile, layout):
    choices = [
        [r.choice for r in profile.kind_of(layer).choices] for layer in range(profile.num_layers)
    ]
    for combination in itertools.product(*choices):
        yield RecomputePolicy.parse(
            ",".join(f"{c}*1" for c in combination), num_layers=profile.num_layers
        )


def test_points_are_those_of_a_plain_walk():
    for seed in range(40):
        profile, layout, _, _ = overlapped(seed)
        table, (chunk,) = CostTable(profile), layout.stages[0]
        for policy in itertools.islice(every_policy(profile, layout), 4):
            columns = ChunkColumns(chunk, table.chunk_units(chunk, policy))
            points = overlap.points(columns, columns, profile.boundary_bytes)
            expected = walked(list(columns.units), profile.boundary_bytes, chunk.head)
            assert max(p.own_bytes + p.other_bytes for p in points) == expected, seed


def test_what_is_found_fits_and_its_bound_holds_for_every_choice():
    same = feasible = 0
    for seed in range(40):
        profile, layout, schedule, budget = overlapped(seed)
        problem = Problem(profile, layout, schedule, allowed=["none", "full", *MODULES])
        found = problem.stages.stage(0).fastest(budget)
        stage = problem.stages.stage(0)
        splits = ((policy.layers,) for policy in every_policy(profile, layout))
        fitting = [
            int(stage.problem.chunks[0].plan(split[0])[:HELD].sum())
            for split in splits
            if stage.true_peak(split) <= budget
        ]
        if found is None:
            assert not fitting or problem.stages.leanest[0].peak_bytes > budget
            continue
        feasible += 1
        policy = RecomputePolicy(found.policies[0])
        assert problem.cost(policy).stages[0].peak_high_bytes == found.peak_bytes <= budget
        assert found.bound_ps <= min(fitting) <= found.time_ps
        same += min(fitting) == found.time_ps
    assert feasible > 20
    assert same > 0.9 * feasible


MODULES = ("selective[core_attn]", "selective[mlp]")
