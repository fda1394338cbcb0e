"""What the committed runs' raw steps say of how times are measured: docs/gpu-evidence.md."""

import json
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.samples import lower_quartile

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu"


def items(run, section):
    results = json.loads((RESULTS / str(run) / "results.json").read_text())
    return results["sections"][section]["items"]


def apart(run, section, statistic):
    """By how much two runs of the same work differ in the mean: Megatron's path, and ours."""
    pairs = [(one["megatron_ms"], one["ours_ms"]) for one in items(run, section).values()]
    return statistics.mean(abs(statistic(a) / statistic(b) - 1) for a, b in pairs)


def median_of_three(times_ms):
    return statistics.median(times_ms[:3])


@pytest.mark.parametrize("model", ["mla-350m", "moe-8-experts"])
def test_where_steps_jitter_lower_quartiles_of_equal_work_agree_best(model):
    found = apart(4, f"5-{model}", lower_quartile)
    assert found < 0.03
    assert found < 0.7 * apart(4, f"5-{model}", statistics.median)
    assert found < 0.2 * apart(4, f"5-{model}", median_of_three)


@pytest.mark.parametrize(("run", "model"), [(1, "gpt-350m-unfused"), (3, "gpt-600m-te")])
def test_where_they_do_not_a_lower_quartile_says_the_same_within_a_hundredth(run, model):
    assert apart(run, f"5-{model}", lower_quartile) < 0.011


def ratio(run, model, arm, *strategies):
    found = items(run, f"5-{model}")
    one, other = (lower_quartile(found[f"strategy/megatron:{name}"][arm]) for name in strategies)
    return one / other


@pytest.mark.parametrize("arm", ["megatron_ms", "ours_ms"])
def test_steps_of_strategies_drift_by_as_much_as_groups_take_more(arm):
    """With attention recomputed no step is really shorter than with nothing."""
    attention = ratio(4, "moe-8-experts", arm, "selective[core_attn]", "none")
    assert attention == pytest.approx(0.86, abs=0.01)
    for model in ("mla-350m", "moe-8-experts"):
        assert 1.12 < ratio(4, model, arm, "uniform/2", "uniform/1") < 1.185
    for run, model in ((1, "gpt-350m-unfused"), (3, "gpt-600m-te")):
        assert ratio(run, model, arm, "uniform/2", "uniform/1") < 1.0125


def errors_of_additive_times(model):
    """Steps of part 3, each predicted from the times of choices that fit all others best: no
    profile can say more than these."""
    found = items(3, f"3-{model}")
    policies = [one for name, one in found.items() if name.startswith("policy/")]
    layers = json.loads(found["profile"])["model"]["num_layers"]
    counts = [_counted(one["policy"], layers) for one in policies]
    names = sorted(set().union(*counts))
    work = np.array([[count[name] for name in names] + [1] for count in counts], float)
    steps_ms = np.array([lower_quartile(one["step_ms"]) for one in policies])
    errors = []
    for number, step_ms in enumerate(steps_ms):
        others = np.arange(len(steps_ms)) != number
        fitted = np.linalg.lstsq(work[others], steps_ms[others], rcond=None)[0]
        errors.append(abs(work[number] @ fitted / step_ms - 1))
    return errors


def _counted(text, layers):
    policy = RecomputePolicy.parse(text, num_layers=layers)
    return Counter(str(one) if one.group == 1 else "full/N" for one in policy.layers)


@pytest.mark.parametrize(
    ("model", "suffice"),
    [
        ("gpt-350m-unfused", True),
        ("gpt-600m-te", True),
        ("mla-350m", False),
        ("moe-8-experts", False),
    ],
)
def test_three_steps_of_a_policy_suffice_to_judge_times_only_where_the_device_decides(
    model, suffice
):
    assert (statistics.median(errors_of_additive_times(model)) < 0.025) == suffice
