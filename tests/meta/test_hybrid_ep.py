"""HybridEP's dispatch: rows by hand, as Megatron and DeepEP allocate them."""

import pytest

from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.expert_rows import rows
from megatron_autorecompute.meta.profiling import profile_job
from tests.meta.test_ep_overlap import FIELDS, HYBRID_EP, OVERLAP
from tests.meta.test_no_device import H100, HIDDEN, MOE, SEQUENCE, job

B200 = device("b200-180gb")
EXPERTS = {**FIELDS, **HYBRID_EP}
TOP_K, FFN = MOE["moe_router_topk"], 512
ROWS = TOP_K * SEQUENCE
CAPACITY = {"moe_expert_rank_capacity_factor": 1.5, "use_transformer_engine_op_fuser": True}
STASH = {"moe_paged_stash": True, "moe_paged_stash_buffer_size_factor_cuda": 1.25}
SAVED = 2 * (HIDDEN + 2 * FFN + FFN)
"""Bytes of a row: the input of each product and of the gate between."""


def profiled(**fields):
    asked = job({**EXPERTS, **fields}, num_gpus=4, global_batch_size=16)
    return profile_job(asked, H100, only=())


def held(**fields):
    (kind,) = profiled(**fields).kinds
    return next(r.held_bytes for r in kind.choices if r.choice == "none")


@pytest.mark.any_version
def test_pages_hold_what_experts_keep_in_place_of_the_whole_room():
    even, room = held(), held(**CAPACITY)
    assert room - even == pytest.approx(0.5 * ROWS * SAVED, abs=4 * ROWS)
    assert room - held(**CAPACITY, **STASH) == pytest.approx(0.25 * ROWS * SAVED, abs=4 * ROWS)


@pytest.mark.any_version
def test_a_rank_makes_no_copies_of_the_tokens_that_it_sends():
    asked = ({**OVERLAP, "moe_token_dispatcher_type": name} for name in ("alltoall", "flex"))
    before = [profiled(**fields).kinds[0].choices[0].parts[0] for fields in asked]
    sent = before[0].forward_end_bytes - before[1].forward_end_bytes
    assert 0 <= sent - 2 * ROWS * HIDDEN < 0.1 * sent  # and alltoall's maps of rows


@pytest.mark.any_version
@pytest.mark.parametrize("fields", [{}, {"moe_flex_dispatcher_backend": "deepep"}])
def test_the_experts_can_be_rerun_and_no_exchange_kept(fields):
    flex = {**EXPERTS, "moe_token_dispatcher_type": "flex", **fields}
    asked = job(flex, num_gpus=4, global_batch_size=16)
    (kind,) = profile_job(asked, H100, only=["experts"]).kinds
    choices = {record.choice for record in kind.choices} | kind.inert.keys()
    assert choices == {"none", "selective[experts]", "full"}  # no full+keep[dispatch]


@pytest.mark.any_version
def test_room_that_no_token_takes_costs_bytes_and_no_time():
    records = [
        {r.choice: r for r in p.kinds[0].choices}["none"]
        for p in (profiled(), profiled(**CAPACITY))
    ]
    even, room = records
    assert room.held_bytes > even.held_bytes
    assert room.forward_ms == pytest.approx(even.forward_ms, rel=0.02)


def test_every_expert_has_whole_blocks_of_rows():
    fields = {**EXPERTS, "moe_router_topk": 2}
    assert rows(job(fields, precision="mxfp8"), 100, 4) == 4 * 64  # 50 each
    assert rows(job({**fields, **CAPACITY}), 100, 4) == 512  # 300 in all


@pytest.mark.any_version
def test_an_output_layer_in_fp8_has_copies_of_its_weights_in_both_layouts():
    fields = {"precision": "mxfp8", "num_gpus": 4, "global_batch_size": 16}
    plain, copied = (
        profile_job(job({**FIELDS, **more}, **fields), B200, only=()).stages[-1].static.total_bytes
        for more in ({}, {"fp8_output_proj": True})
    )
    assert copied - plain == 2 * 33 * 1024 * HIDDEN // 32  # 1000 words are padded to 1024


@pytest.mark.any_version
def test_fields_that_ask_for_fp8_or_a_kernel_are_read_and_named():
    asked = {"moe_router_padding_for_quantization": True, "fused_single_qkv_rope": True}
    found = profile_job(job({**FIELDS, **asked}, precision="mxfp8", num_gpus=4), B200, only=())
    assert all(name in found.assumptions[-1] for name in asked)


@pytest.mark.any_version
def test_the_op_fusers_activation_keeps_its_input_alone():
    fused = {"use_transformer_engine_op_fuser": True}
    assert held(**fused, activation_func_clamp_value=7.0) == held(**fused)
