"""What fused permutation of tokens keeps, counted in Megatron's own MoE layer."""

import pytest
import torch

from megatron_autorecompute.meta.model import shard
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from tests.meta.test_no_device import H100, HIDDEN, MOE, SEQUENCE, job

EXPERTS, ROWS = MOE["num_moe_experts"], 2 * SEQUENCE  # two experts for each token
FUSED = {**MOE, "moe_permute_fusion": True}


def saved_by(config):
    """Tensors that a MoE layer saves for its backward, each storage once."""
    found = {}

    def keep(tensor):
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with shard(job(config), [1, 1]) as built:
        layer = built.model.decoder.layers[1]
        x = torch.empty(SEQUENCE, 1, HIDDEN, dtype=torch.bfloat16, device="meta").requires_grad_()
        static = {p.untyped_storage()._cdata for p in layer.parameters()}
        with LiveBytes(), torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            out, _ = layer(x, attention_mask=None)
            out.sum().backward()
    assert x.grad.shape == x.shape
    return [tensor for key, tensor in found.items() if key not in static]


def maps(config):
    return sorted(tuple(t.shape) for t in saved_by(config) if t.dtype == torch.int32)


@pytest.mark.any_version
def test_maps_of_rows_take_4_bytes_for_twice_as_many_experts_and_one_of_each_token():
    whole = (SEQUENCE, 2 * EXPERTS + 1)
    # On one rank tokens are ordered by expert already; Megatron sorts them all the same, there and
    # back, if a rank has several experts.
    assert maps(FUSED) == [whole, (ROWS,), (ROWS,)]
    assert maps({**FUSED, "expert_model_parallel_size": 2}) == [whole, (ROWS,), (ROWS,)]
    assert maps({**FUSED, "expert_model_parallel_size": 8}) == [whole]


def test_without_fusion_megatrons_own_permutation_runs():
    assert maps(MOE) == []
    indices = [t for t in saved_by(MOE) if t.dtype == torch.int64]
    assert indices


def test_deterministic_jobs_keep_the_experts_outputs_and_leave_torch_as_it_was():
    asked, plain = (
        sum(tensor.shape == (ROWS, HIDDEN) for tensor in saved_by({**MOE, **more}))
        for more in ({"deterministic_mode": True}, {})
    )
    assert asked == plain + 1
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.any_version
def test_every_choice_of_a_fused_moe_layer_is_profiled():
    fused, plain = (profile_job(job(config), H100).kinds[1] for config in (FUSED, MOE))
    assert [r.choice for r in fused.choices] == [r.choice for r in plain.choices]
    full, none = (
        next(r for r in fused.choices if r.choice == choice).held_bytes
        for choice in ("full", "none")
    )
    assert full < none
