"""What auto cannot measure is refused in the words of the program around."""

from types import SimpleNamespace

import pytest

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.auto_rules import (
    as_field,
    as_flag,
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


@pytest.mark.parametrize(
    ("policy", "spelled", "said"),
    [
        ("full", as_flag, r"with --recompute-policy full: .* Give --recompute-policy auto"),
        (["full"] * 99, as_field, r"with model.recompute_policy=\['full', .* Give model.recompute"),
        (
            None,
            as_field,
            "with no policy: only auto makes a plan. Give model.recompute_policy=auto",
        ),
    ],
)
def test_a_plan_alone_is_asked_of_auto_only(policy, spelled, said):
    refuse_without_auto(AutoOptions(), policy, spelled)
    only = AutoOptions(recompute_plan_only=True)
    refuse_without_auto(only, "auto", spelled)
    with pytest.raises(OptionError, match=said):
        refuse_without_auto(only, policy, spelled)
    moves = AutoOptions(recompute_allow_offload=True)
    refuse_without_auto(moves, "auto", spelled)
    with pytest.raises(OptionError, match="a policy that offloads needs no leave"):
        refuse_without_auto(moves, policy, spelled)
