"""What `compat` says of the installed Megatron, against Megatron itself."""

import pytest
from megatron.core.tensor_parallel import random

from megatron_autorecompute.compat import layer_modules, rules, stage_layout, versions
from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.policy import RecomputePolicy

pytestmark = pytest.mark.usefixtures("one_rank")
COMPILING = getattr(random, "_get_share_storage", None)
"""Megatron's own, as no stand-in is in place yet; None before 0.17."""


def test_every_module_that_megatron_allows_has_its_flags():
    unknown = set(rules.allowed_modules()) - set(layer_modules.MODULE_FLAGS)
    assert not unknown
    assert ("gdn_norm_out" in rules.allowed_modules()) == (versions.installed().minor >= 19)


def test_a_policy_counts_in_the_chunks_of_the_configs_layout():
    from tests.support import tiny_config

    config = tiny_config(
        num_layers=6,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|t*2|t|t*2L",
        mtp_num_layers=None,
    )
    assert stage_layout.counted_chunks(config) == [[0], [1, 2], [3], [4, 5]]
    policy = RecomputePolicy.parse(
        "megatron:block/1", num_layers=6, layout=stage_layout.counted_chunks(config)
    )
    assert policy.format() == "full+all*2,none*1,full+all*2,none*1"


def test_without_a_compiler_the_modules_that_need_one_are_refused(monkeypatch):
    if COMPILING is None:
        pytest.skip("before 0.17 nothing is compiled at run time")
    monkeypatch.setattr(random, "_get_share_storage", COMPILING)
    monkeypatch.setenv("PATH", "")
    needs = RecomputePolicy.parse("selective[layernorm]", num_layers=1)
    with pytest.raises(MachineError, match=r"layernorm .* compiles .* g\+\+ and ninja cannot be"):
        rules.check_compiler(needs)
    rules.check_compiler(RecomputePolicy.parse("selective[core_attn]", num_layers=1))


def test_without_transformer_engine_the_modules_that_need_it_are_refused(monkeypatch):
    monkeypatch.delattr(random, "FP8GlobalStateManager")
    with pytest.raises(MachineError, match=r"Recomputing layernorm .* needs Transformer Engine"):
        rules.check_compiler(RecomputePolicy.parse("selective[layernorm]", num_layers=1))
    rules.check_compiler(RecomputePolicy.parse("selective[core_attn+mlp]", num_layers=1))
