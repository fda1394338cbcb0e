"""What auto cannot measure is refused."""

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.runtime.auto_options import (
    AutoOptions,
    refuse_for_auto,
    refuse_percentile,
    refuse_without_auto,
)

pytestmark = pytest.mark.any_version

MEASURABLE = {
    "cuda_graph_impl": "none",
    "overlap_moe_expert_parallel_comm": False,
    "num_moe_experts": None,
}


@pytest.mark.parametrize(
    ("changed", "given", "instead"),
    [
        (
            {"cuda_graph_impl": "local"},
            "recompute_policy=auto was given with cuda_graph_impl=local",
            "with cuda_graph_impl=none and a plan path, then give recompute_policy=@PLAN",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True},
            "recompute_policy=auto was given with overlap_moe_expert_parallel_comm:",
            "selective[layernorm], or @PLAN with a plan made without a device",
        ),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused_with_what_to_give_instead(
    changed, given, instead
):
    refuse_for_auto(AutoOptions(), SimpleNamespace(**MEASURABLE))
    with pytest.raises(OptionError) as refused:
        refuse_for_auto(AutoOptions(), SimpleNamespace(**MEASURABLE | changed))
    assert given in str(refused.value)
    assert instead in str(refused.value)


WITHOUT_EFFECT = {
    "--recompute-memory-budget-gib 0.0042": {"recompute_memory_budget_gib": 0.0042},
    "--recompute-memory-reserve-gib 2.0": {"recompute_memory_reserve_gib": 2.0},
    "--recompute-imbalance-percentile 95.0": {"recompute_imbalance_percentile": 95.0},
    "--recompute-measure-steps 6": {"recompute_measure_steps": 6},
    "--recompute-plan-path np.json": {"recompute_plan_path": "np.json"},
    "--recompute-plan-only": {"recompute_plan_only": True},
    "--recompute-choices megatron": {"recompute_choices": "megatron"},
    "--recompute-allow-offload": {"recompute_allow_offload": True},
}


def test_every_option_but_the_one_for_any_job_is_in_the_table():
    named = {name for given in WITHOUT_EFFECT.values() for name in given}
    assert {field.name for field in fields(AutoOptions)} == named | {"recompute_run_on_cpu"}


@pytest.mark.parametrize("flag", WITHOUT_EFFECT)
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (None, "no policy"),
        ("full", "recompute_policy=full"),
        ("@plan.json", "recompute_policy=@plan.json"),
        (["full"] * 99, "recompute_policy=['full', "),
    ],
)
def test_what_only_auto_uses_is_refused_without_it(flag, policy, said):
    options = AutoOptions(**WITHOUT_EFFECT[flag])
    refuse_without_auto(options, "auto")
    if policy is not None and "recompute_choices" in WITHOUT_EFFECT[flag]:
        refuse_without_auto(options, policy)  # it acts on any policy
        return
    with pytest.raises(OptionError) as refused:
        refuse_without_auto(options, policy)
    text = str(refused.value)
    assert text.startswith(f"{flag}: given with {said}")
    assert text.endswith(f"Give the policy auto, or leave {flag} out.")


@pytest.mark.parametrize("policy", [None, "full", "auto"])
def test_what_has_an_effect_in_any_job_is_allowed(policy):
    refuse_without_auto(AutoOptions(), policy)
    refuse_without_auto(AutoOptions(recompute_run_on_cpu=True), policy)


def test_all_options_without_effect_are_named_at_once():
    both = AutoOptions(recompute_memory_budget_gib=1.0, recompute_plan_path="np.json")
    with pytest.raises(OptionError, match=r"-gib 1\.0, --recompute-plan-path np\.json: given"):
        refuse_without_auto(both, None)


def test_a_percentile_of_routing_is_refused_where_nothing_is_routed():
    asked = AutoOptions(recompute_imbalance_percentile=95.0)
    dense, experts = (SimpleNamespace(**{**MEASURABLE, "num_moe_experts": n}) for n in (None, 8))
    refuse_percentile(asked, experts)
    refuse_percentile(AutoOptions(), dense)
    with pytest.raises(OptionError, match=r"percentile 95: .*this model has none\. Leave it out"):
        refuse_percentile(asked, dense)


@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_budget_above_the_devices_memory_is_refused_with_what_there_is(monkeypatch, on_cuda):
    has = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_cuda)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: has)
    config = SimpleNamespace(**MEASURABLE)
    whose = "a device has 80.00 GiB" if on_cuda else "this machine has "
    refuse_for_auto(AutoOptions(), config)
    refuse_for_auto(AutoOptions(recompute_memory_budget_gib=0.5), config)
    if on_cuda:
        refuse_for_auto(AutoOptions(recompute_memory_budget_gib=80), config)
    for gib in (1e9, 1e6):
        with pytest.raises(OptionError, match=re.escape(f"budget-gib {gib:g}: {whose}")):
            refuse_for_auto(AutoOptions(recompute_memory_budget_gib=gib), config)
