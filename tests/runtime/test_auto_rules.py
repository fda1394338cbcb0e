"""What auto cannot measure is refused in the words of the program around."""

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.runtime.auto_options import (
    AutoOptions,
    as_field,
    as_flag,
    refuse_beyond_device,
    refuse_percentile,
    refuse_unmeasurable,
    refuse_without_auto,
)

pytestmark = pytest.mark.any_version

MEASURABLE = {"cuda_graph_impl": "none", "overlap_moe_expert_parallel_comm": False}


@pytest.mark.parametrize(
    ("changed", "spelled", "given", "instead"),
    [
        (
            {"cuda_graph_impl": "local"},
            as_flag,
            "--recompute-policy auto was given with --cuda-graph-impl local",
            "then give --recompute-policy @PLAN",
        ),
        (
            {"cuda_graph_impl": "local"},
            as_field,
            "model.recompute_policy=auto was given with model.cuda_graph_impl=local",
            "with model.cuda_graph_impl=none",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True},
            as_flag,
            "--recompute-policy auto was given with --overlap-moe-expert-parallel-comm:",
            "--recompute-policy @PLAN with a plan made without a device",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True},
            as_field,
            "auto was given with model.overlap_moe_expert_parallel_comm=True",
            "model.recompute_policy=selective[layernorm]",
        ),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused_with_what_to_give_instead(
    changed, spelled, given, instead
):
    refuse_unmeasurable(SimpleNamespace(**MEASURABLE), spelled)
    with pytest.raises(OptionError) as refused:
        refuse_unmeasurable(SimpleNamespace(**MEASURABLE | changed), spelled)
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
    ("policy", "spelled", "said"),
    [
        (None, as_flag, "no policy"),
        ("full", as_flag, "--recompute-policy full"),
        ("@plan.json", as_flag, "--recompute-policy @plan.json"),
        (["full"] * 99, as_field, "model.recompute_policy=['full', "),
    ],
)
def test_what_only_auto_uses_is_refused_without_it(flag, policy, spelled, said):
    options = AutoOptions(**WITHOUT_EFFECT[flag])
    refuse_without_auto(options, "auto", spelled)
    if policy is not None and "recompute_choices" in WITHOUT_EFFECT[flag]:
        refuse_without_auto(options, policy, spelled)  # it acts on any policy
        return
    with pytest.raises(OptionError) as refused:
        refuse_without_auto(options, policy, spelled)
    text = str(refused.value)
    assert text.startswith(f"{flag}: given with {said}")
    assert text.endswith(f"Give {spelled('recompute_policy', 'auto')}, or leave {flag} out.")


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
    dense, experts = SimpleNamespace(num_moe_experts=None), SimpleNamespace(num_moe_experts=8)
    refuse_percentile(asked, experts)
    refuse_percentile(AutoOptions(), dense)
    with pytest.raises(OptionError, match=r"percentile 95: .*this model has none\. Leave it out"):
        refuse_percentile(asked, dense)


@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_budget_above_the_devices_memory_is_refused_with_what_there_is(monkeypatch, on_cuda):
    has = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_cuda)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: has)
    whose = "a device has 80.00 GiB" if on_cuda else "this machine has "
    refuse_beyond_device(AutoOptions())
    refuse_beyond_device(AutoOptions(recompute_memory_budget_gib=0.5))
    if on_cuda:
        refuse_beyond_device(AutoOptions(recompute_memory_budget_gib=80))
    for gib in (1e9, 1e6):
        with pytest.raises(OptionError, match=re.escape(f"budget-gib {gib:g}: {whose}")):
            refuse_beyond_device(AutoOptions(recompute_memory_budget_gib=gib))
