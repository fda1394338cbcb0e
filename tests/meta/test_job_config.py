"""What a job does not say, held against the installed Megatron."""

import dataclasses

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.meta.job_config import Resolved

pytestmark = pytest.mark.newest_version

OTHERS = {
    "moe_token_dispatcher_type": "allgather",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "deallocate_pipeline_outputs": False,
    "overlap_p2p_comm": False,
    "fp8_recipe": "delayed",
    "cuda_graph_modules": "full",
}
"""Defaults of TransformerConfig that a job does not have, as `Resolved` says of each."""


def test_what_a_job_does_not_say_is_what_megatrons_config_has_then():
    megatrons = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    given = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1}
    ours = dataclasses.asdict(Resolved.of(given))
    shared = [name for name in ours if name in megatrons and name not in given]
    assert len(shared) > 40
    for name in shared:
        default = getattr(megatrons[name], "name", megatrons[name])  # of an enumeration
        default = getattr(default, "__name__", default)  # of a function
        if name in OTHERS:
            assert default == OTHERS[name] != ours[name]
        else:
            assert ours[name] == default or not (ours[name] or default), name


def test_a_field_that_is_given_no_value_is_as_one_that_is_not_given():
    config = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "moe_router_topk": None}
    assert Resolved.of(config).moe_router_topk == 2
    assert Resolved.of({**config, "sequence_parallel": True}).sequence_parallel
