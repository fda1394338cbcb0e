"""Times in which doing more is never faster, against the max-min formula over all parts."""

import itertools
import random

import numpy as np
import pytest

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StageRecord,
    StaticBytes,
    in_order,
)
from megatron_autorecompute.work_order import GAP_MS, contains, isotonic, ordered_ms

MODULES = ("core_attn", "layernorm", "moe", "moe_act", "shared_experts")
ALL = [
    LayerPolicy(),
    LayerPolicy("full"),
    *(
        LayerPolicy("selective", chosen)
        for size in range(1, 6)
        for chosen in itertools.combinations(MODULES, size)
    ),
]


@pytest.mark.parametrize(
    ("larger", "smaller", "contained"),
    [
        ("full", "none", True),
        ("selective[mlp]", "none", True),
        ("full", "selective[core_attn+layernorm+mlp]", True),
        ("selective[core_attn+mlp]", "selective[mlp]", True),
        ("selective[moe]", "selective[moe_act]", True),
        ("selective[layernorm+moe]", "selective[layernorm+moe_act+shared_experts]", True),
        ("full/4", "none", True),
        ("full/4", "selective[mlp]", True),
        ("none", "none", False),
        ("full/4", "full", False),
        ("full", "full/2", False),
        ("full+inner/2", "full", True),
        ("full", "inner/2", True),
        ("inner/2", "inner/1", True),
        ("inner/1", "none", True),
        ("inner/1", "inner/1", False),
        ("inner/2", "selective[mlp]", False),
        ("selective[mlp]", "inner/1", False),
        ("selective[mlp]", "selective[core_attn]", False),
        ("selective[mlp]", "selective[core_attn+mlp]", False),
        ("selective[moe+moe_act]", "selective[moe]", False),
        ("none", "full", False),
        ("none+offload[mlp_norm]", "none", True),
        ("selective[mlp]+offload[mlp_norm]", "none+offload[mlp_norm]", True),
        ("selective[mlp]", "none+offload[mlp_norm]", False),
        ("full", "none+offload[mlp_norm]", False),
        ("none+offload[mlp_norm]", "full", False),
        ("full+all", "full", True),
        ("full", "full+all", False),
        ("full", "selective[core_attn]+all", True),  # the linear after it reads the context
        ("full", "selective[mlp]+all", False),
        ("full", "selective[moe]+all", False),
        ("full+all", "selective[moe]+all", True),
        ("full+all", "selective[core_attn+mlp]+all", True),
        ("selective[core_attn]+all", "selective[core_attn]", True),
        ("selective[mlp]+all", "selective[mlp]", True),
        ("selective[moe]+all", "selective[moe]", True),
        ("selective[mlp]", "selective[mlp]+all", False),
        ("full", "full+keep[core_attn]", True),
        ("full+keep[core_attn]", "full+keep[core_attn+dispatch]", True),
        ("full+keep[core_attn]", "full+keep[dispatch]", False),
        ("full+keep[core_attn]", "selective[core_attn]", False),
        ("full+keep[core_attn]", "selective[moe+qkv]", True),
        ("full+keep[dispatch]", "selective[moe]", False),
        ("full+keep[dispatch]", "selective[moe]+keep[dispatch]", True),
        ("selective[moe]", "selective[moe]+keep[dispatch]", True),
        ("selective[moe]+keep[dispatch]", "selective[experts]", True),
        ("selective[experts]", "selective[moe]+keep[dispatch]", False),
        ("selective[experts]", "selective[moe_act]", True),
        ("selective[experts]", "selective[shared_experts]", False),
        ("selective[mlp]", "selective[mlp_act]", True),
        ("selective[mlp_act]", "selective[mlp]", False),
        ("full", "selective[mlp_act]", True),
        ("selective[qkv]", "selective[mla_up_proj]", True),
        ("full", "selective[mlp_act+qkv]", True),
        ("selective[core_attn]", "selective[qkv]", False),
        ("full+keep[core_attn]", "selective[ln_out]", True),
        ("selective[ln_out+mlp_act]", "selective[ln_out]", True),
        ("selective[mlp]", "selective[ln_out]", False),
    ],
)
def test_a_choice_contains_those_whose_work_it_does(larger, smaller, contained):
    assert contains(LayerPolicy.parse(larger), LayerPolicy.parse(smaller)) is contained


def parts(order, count):
    """Every set of positions that holds all above each of its members."""
    for bits in itertools.product((False, True), repeat=count):
        if all(bits[upper] or not bits[lower] for lower, upper in order):
            yield np.array(bits)


def by_formula(values, weights, order):
    """Of upper parts around a position the highest, of lower parts in them the lowest, mean."""
    uppers = list(parts(order, len(values)))
    lowers = [~upper for upper in uppers]
    return [
        max(
            min(np.average(values[u & low], weights=weights[u & low]) for low in lowers if low[at])
            for u in uppers
            if u[at]
        )
        for at in range(len(values))
    ]


def test_isotonic_regression_is_the_max_min_formulas():
    for seed in range(40):
        rng = random.Random(seed)
        count = rng.randint(1, 6)
        numbered = itertools.combinations(range(count), 2)
        order = [pair for pair in numbered if rng.random() < 0.5]
        values = np.array([float(rng.randint(0, 9)) for _ in range(count)])
        weights = np.array([float(rng.randint(1, 20)) for _ in range(count)])
        expected = by_formula(values, weights, order)
        assert isotonic(values, weights, order) == pytest.approx(expected, abs=1e-9), seed


def test_ordered_times_are_in_order_and_never_below_0():
    for seed in range(40):
        rng = random.Random(seed)
        choices = rng.sample(ALL, rng.randint(2, 20))
        scale = 10 ** rng.uniform(-3, 4)
        times = [[scale * max(0.0, rng.gauss(1, 0.7)) for _ in choices] for _ in range(2)]
        weights = [rng.randint(1, 50) for _ in choices]
        forward, backward = ordered_ms(choices, *times, weights)
        assert min(forward + backward) >= 0
        for (a, one), (b, other) in itertools.permutations(enumerate(choices), 2):
            if contains(one, other):
                assert backward[a] > backward[b]
                assert forward[a] + backward[a] > forward[b] + backward[b]


def test_times_in_order_come_back_as_they_are():
    choices = [LayerPolicy.parse(text) for text in ("none", "full", "selective[mlp]")]
    forward, backward = [1.1, 1.05, 1.2], [2.2, 3.3, 2.9]  # full's forward saves nothing
    assert ordered_ms(choices, forward, backward, [3, 4, 5]) == (forward, backward)


def test_a_time_counts_by_its_samples():
    choices = [LayerPolicy.parse(text) for text in ("none", "full")]
    _, backward = ordered_ms(choices, [1.0, 1.0], [30.0, 20.0], [3, 1])
    assert backward == pytest.approx([27.5, 27.5])


def noisy(rng, choice, more_ms, sigma):
    forward, backward = (ms * max(0.3, rng.gauss(1, sigma)) for ms in (10.0, 20.0 + more_ms))
    held = {"none": 100, "full": 2}.get(choice, 60)
    return ChoiceRecord(choice, held, 0, 0, forward, backward)


def test_nothing_is_recomputed_where_memory_is_free_whatever_the_noise():
    more_ms = {"none": 0, "full": 10, "selective[core_attn]": 2, "selective[layernorm]": 0.5}
    more_ms |= {"selective[mlp]": 6, "selective[core_attn+layernorm+mlp]": 8.5}
    nothing = ChoiceRecord("none", 1, 0, 0, 1.0, 1.0)
    for seed, (stages, chunks) in itertools.product(range(12), [(1, 1), (4, 1), (2, 2)]):
        rng = random.Random(seed)
        records = [noisy(rng, choice, ms, 0.2) for choice, ms in more_ms.items()]
        kind = LayerKind("dense", tuple(range(8)), in_order(records, [1] * len(records)))
        profile = Profile(
            Model("noisy", 8),
            Parallelism(1, 1),
            (kind,),
            embedding=nothing,
            head=nothing,
            boundary_bytes=1,
            stages=tuple(
                StageRecord(tuple(layer for chunk in own for layer in chunk.layers), StaticBytes())
                for own in Layout.from_flags(8, stages, chunks).stages
            ),
        )
        problem = Problem(
            profile, Layout.from_flags(8, stages, chunks), Schedule(stages, chunks, 8)
        )
        solution = solve(problem.at(1 << 40))
        assert solution.policy.format() == "none*8", seed


def test_a_moved_time_is_uncertain_by_as_much():
    records = [
        ChoiceRecord("none", 9, 0, 0, 10.0, 22.0, 0.5),
        noisy(random.Random(0), "full", 0, 0),
    ]
    none, full = in_order(records, [1, 1])
    assert (none.forward_ms, full.forward_ms) == (10.0, 10.0)
    assert none.backward_ms == pytest.approx(21, abs=2 * GAP_MS)
    assert (none.spread_ms, full.spread_ms) == pytest.approx((1, 1), abs=2 * GAP_MS)
