import itertools
import random

import pytest

from megatron_autorecompute.compare.comparison import needless, reruns_more
from megatron_autorecompute.policy import RecomputePolicy

pytestmark = pytest.mark.any_version

MODULES = ("core_attn", "layernorm", "mlp")
CHUNKS = [[0, 1, 2], [3, 4, 5], [6, 7]]
NAMES = [
    "megatron:none",
    *(
        f"megatron:selective[{'+'.join(chosen)}]"
        for size in (1, 2, 3)
        for chosen in itertools.combinations(MODULES, size)
    ),
    *(f"megatron:block/{n}" for n in (1, 2)),
    *(f"megatron:uniform/{n}" for n in (1, 2, 3)),
]
"""In the order of `TrainingJob.own_settings`."""


def policy(name):
    return RecomputePolicy.parse(name, num_layers=8, layout=CHUNKS)


def parts_rerun(name):
    """Every (layer, part of a layer) that runs again; a layer has a part that is no module."""
    return {
        (layer, part)
        for layer, choice in enumerate(policy(name).layers)
        for part in (*MODULES, "rest")
        if choice.granularity == "full" or part in choice.modules
    }


def test_a_setting_reruns_more_where_what_it_runs_again_contains_the_others():
    for larger, smaller in itertools.product(NAMES, NAMES):
        expected = parts_rerun(larger) > parts_rerun(smaller)
        assert reruns_more(policy(larger), policy(smaller)) == expected, (larger, smaller)


def test_experts_rerun_what_is_within_them():
    larger, smaller = (
        RecomputePolicy.parse(f"selective[{name}]", num_layers=2)
        for name in ("layernorm+moe", "layernorm+moe_act+shared_experts")
    )
    assert reruns_more(larger, smaller)
    assert not reruns_more(smaller, larger)


def test_the_fastest_setting_that_fits_is_never_passed_over():
    rng, passed_over = random.Random(0), 0
    for _ in range(200):
        took_ms = {part: rng.random() for part in itertools.product(range(8), (*MODULES, "rest"))}
        times_ms = {name: sum(took_ms[part] for part in parts_rerun(name)) for name in NAMES}
        fits = {name for name in NAMES if rng.random() < 0.4} | {"megatron:uniform/1"}
        fitting = {}
        for name in NAMES:
            needed = not needless(policy(name), fitting)
            if needed and name in fits:
                fitting[name] = policy(name)
            passed_over += not needed
        assert min(times_ms[name] for name in fitting) == min(times_ms[name] for name in fits)
    assert passed_over > 200


def test_the_reason_names_the_setting_that_fits():
    fitting = {"block/1": policy("megatron:block/1")}
    reason = needless(policy("megatron:block/2"), fitting)
    assert reason == "reruns all that block/1 reruns, which fits, and more"
    assert needless(policy("megatron:selective[mlp]"), fitting) is None
