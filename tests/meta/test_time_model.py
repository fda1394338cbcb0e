"""Collectives by the ranks they join, what overlaps, the host, and the end of a step."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.devices import Efficiency, device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.kept_bytes import counted_weights
from megatron_autorecompute.meta.profiling import profile_job, traffic
from megatron_autorecompute.meta.roofline import (
    ALLTOALL,
    TAKEN_BY_NCCL,
    Communication,
    Links,
    Roofline,
    Spread,
    Traffic,
    share_with_copies,
)
from megatron_autorecompute.meta.static_bytes import Parameters, Trained
from megatron_autorecompute.meta.step_end import iteration_flops, step_end_ms

pytestmark = pytest.mark.any_version

H100 = device("h100-80gb")
PEAKS = Efficiency()
GB = 10**9
ROWS_BYTES, TABLE_BYTES = 4 * 100 * 4096, 4 * 100_000 * 4096


def seconds(name, ranks, spread=None, efficiency=PEAKS):
    return Links(H100, efficiency).seconds(name, GB, ranks, spread)


def test_a_collective_takes_the_links_that_its_ranks_have():
    link, network = 450e9, 50e9
    assert seconds("_allgather_base_", range(8)) == pytest.approx(7 / 8 * GB / link)
    assert seconds("allreduce_", range(0, 8, 2)) == pytest.approx(2 * 3 / 4 * GB / link)
    # One rank in each domain has one card; four have four.
    assert seconds("_allgather_base_", range(0, 64, 8)) == pytest.approx(7 / 8 * GB / network)
    assert seconds("_allgather_base_", range(0, 64, 2)) == pytest.approx(31 / 32 * GB / 200e9)
    late = replace(PEAKS, collective_us=20, rank_us=10)
    assert seconds("_allgather_base_", range(8), efficiency=late) == pytest.approx(
        7 / 8 * GB / link + 90e-6
    )


def test_an_alltoall_sends_near_and_far_at_once_and_flex_sends_a_token_to_a_domain_once():
    assert seconds(ALLTOALL, range(8)) == pytest.approx(7 / 8 * GB / 450e9)
    assert seconds(ALLTOALL, range(16)) == pytest.approx(8 / 16 * GB / 50e9)
    # Of 2 copies of a token, each for one of 16 ranks, one or both are for the other domain: once.
    to_other = 1 - 8 / 16 * 7 / 15
    assert seconds(ALLTOALL, range(16), Spread(16, 2)) == pytest.approx(
        GB / 2 * to_other / 50e9, rel=0.01
    )
    # DeepEP and HybridEP are kernels of their own, without NCCL's time for each rank.
    late = replace(PEAKS, collective_us=20, rank_us=10)
    flex = seconds(ALLTOALL, range(16), Spread(16, 2), late)
    assert flex == pytest.approx(seconds(ALLTOALL, range(16), Spread(16, 2)) + 20e-6)


@pytest.mark.parametrize("domains", [2, 4, 8, 16])
def test_a_router_of_groups_sends_a_token_to_the_domains_that_megatrons_picks(domains):
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    tokens, experts, copies, groups, chosen = 20_000, 256, 8, 8, 4  # DeepSeek-V3's
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    _, picked = group_limited_topk(scores, copies, tokens, experts, groups, chosen)
    sent = torch.zeros(tokens, domains).scatter_(1, picked // (experts // domains), 1.0)
    found = share_with_copies(Spread(experts, copies, groups, chosen), domains)
    assert found == pytest.approx(float(sent.mean()), rel=0.01)
    if domains == groups:
        assert found <= chosen / groups < share_with_copies(Spread(experts, copies), domains)


def test_a_jobs_dispatcher_and_router_say_how_its_tokens_spread():
    router = {"num_moe_experts": 64, "moe_router_topk": 6}
    limited = {**router, "moe_router_num_groups": 8, "moe_router_group_topk": 3}
    flex = {"moe_token_dispatcher_type": "flex"}
    for config, spread in (
        (limited, None),
        ({**router, **flex}, Spread(64, 6)),
        ({**limited, **flex}, Spread(64, 6, 8, 3)),
    ):
        assert traffic(job(config=config)).spread == spread


class TestRoofline:
    """Of one product of 2 ms and collectives of 1 ms or 3 ms, without a process group."""

    def clock(self, **traffic):
        return Roofline(H100, PEAKS, Traffic(**traffic))

    def product(self, clock):
        rows = round(2e-3 * H100.rate("bf16") / 2 / 4096**2)
        x, weight = (
            torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (rows, 4096)
        )
        with clock:
            ops.gemm(x, weight, "bf16")

    def test_what_is_started_before_a_product_runs_beside_it(self):
        for started, expected_ms in ((1e-3, 2), (3e-3, 3)):
            clock = self.clock()
            begin = clock.now()
            clock.started_seconds += started
            self.product(clock)
            assert clock.ms_between(begin, clock.now()) == pytest.approx(expected_ms, rel=1e-2)

    def test_userbuffers_expose_the_first_part_and_what_a_product_is_too_short_for(self):
        clock = self.clock(userbuffers=True)
        self.product(clock)
        clock.beside_product("_reduce_scatter_base_", 4e-3, 4)  # 1 ms first, then 3 beside 2
        assert clock.seconds == pytest.approx(2e-3 + 1e-3 + 1e-3, rel=1e-2)
        clock.beside_product("_allgather_base_", 4e-3, 4)
        self.product(clock)
        assert clock.seconds == pytest.approx(4e-3 + 1e-3 + 3e-3, rel=1e-2)

    def test_a_span_takes_at_least_as_long_as_the_host_needs_for_it(self):
        clock = Roofline(H100, replace(PEAKS, module_us=5000, host_us=100))
        begin = clock.now()
        self.product(clock)
        with clock:
            torch.empty(4, device="meta").add_(1)
        assert clock.ms_between(begin, clock.now()) == pytest.approx(5.2)
        clock = Communication(H100, replace(PEAKS, module_us=5000))
        begin = clock.now()
        self.product(clock)
        assert clock.ms_between(begin, clock.now()) == 0

    @pytest.mark.parametrize(
        ("run", "moved"),
        [
            (lambda table, at, rows: table[at], 2 * ROWS_BYTES),
            (lambda table, at, rows: torch.embedding(table, at), 2 * ROWS_BYTES),
            (lambda table, at, rows: table.index_put_([at], rows), 3 * ROWS_BYTES),
            (lambda table, at, rows: table.index_add_(0, at, rows), 3 * ROWS_BYTES),
            (lambda table, at, rows: table.add_(1), 2 * TABLE_BYTES),
        ],
        ids=["index", "embedding", "index_put_", "index_add_", "add_"],
    )
    def test_what_picks_rows_moves_those_and_not_their_table(self, run, moved):
        clock = self.clock()
        table = torch.empty(100_000, 4096, device="meta")
        at, rows = torch.empty(100, dtype=torch.int64, device="meta"), torch.empty_like(table[:100])
        with clock:
            run(table, at, rows)
        assert clock.seconds == pytest.approx(moved / H100.bandwidth_bytes, rel=1e-3)

    def test_a_product_onto_nothing_does_not_read_what_it_is_written_to(self):
        scores = torch.empty(8, 4096, 4096, dtype=torch.bfloat16, device="meta")
        query = torch.empty(8, 4096, 64, dtype=torch.bfloat16, device="meta")
        found = []
        for beta in (0, 1):
            clock = self.clock()
            with clock:
                torch.baddbmm(scores, query, query.mT, beta=beta)
            found.append(clock.seconds * H100.bandwidth_bytes)
        more = scores.numel() * scores.element_size()
        assert found[1] - found[0] == pytest.approx(more)

    def test_grouped_products_reach_half_at_half_rows(self):
        x = torch.empty(8 * 128, 4096, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(8, 4096, 4096, dtype=torch.bfloat16, device="meta")
        clocks = [
            Roofline(replace(H100, bandwidth_bytes=1e30), e)
            for e in (PEAKS, replace(PEAKS, half_rows=128, half_rows_gradient=384))
        ]
        for clock in clocks:
            with clock:
                y = ops.gemm(x, weight, "bf16")
        assert clocks[1].seconds == pytest.approx(2 * clocks[0].seconds)
        for clock in clocks:
            clock.seconds = 0.0
            with clock:
                ops.gemm_weight_gradient(y, x, weight, "bf16")
        assert clocks[1].seconds == pytest.approx(4 * clocks[0].seconds)


ATTENTION_MS = {
    "h200-141gb": ((64, 8, 1024), (591, 474), (0.358, 1.042)),
    "gb200-186gb": ((128, 128, 128), (1408, 1148), (0.210, 0.465)),
}
"""Of NVIDIA/cudnn-frontend at 3929da2e, benchmark/sdpa_benchmark_training/results, all at 4,096
tokens: heads, their groups and the window; TFLOP/s of cuDNN forward and backward with heads of 128
and no window; milliseconds with 2 samples, heads of 64 and the window."""


@pytest.mark.parametrize("name", ATTENTION_MS)
def test_attention_with_narrow_heads_and_a_window_takes_as_long_as_cudnn(name):
    (heads, groups, window), rates, measured = ATTENTION_MS[name]
    gpu = replace(device(name), bandwidth_bytes=1e30)
    shares = [1e12 * rate / gpu.rate("bf16") for rate in rates]
    q = torch.empty(4096, 2, heads, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4096, 2, groups, 64, dtype=torch.bfloat16, device="meta")
    clock = Roofline(gpu, Efficiency(attention=shares[0], attention_backward=shares[1]))
    with clock:
        out, statistics = ops.attention(q, k, k, 0.5, window)
        forward_ms = 1e3 * clock.seconds
        ops.attention_backward(q, k, k, out, statistics, out, 0.5, window)
    assert 1e3 * clock.seconds == pytest.approx(sum(measured), rel=0.08)
    assert forward_ms == pytest.approx(measured[0], rel=0.25)


def test_heads_of_128_reach_what_a_device_does_without_a_window():
    gpu = replace(device("gb200-186gb"), bandwidth_bytes=1e30)
    q = torch.empty(4096, 2, 64, 128, dtype=torch.bfloat16, device="meta")
    clock = Roofline(gpu, PEAKS)
    with clock:
        ops.attention(q, q, q, 0.5, 0)
    assert clock.seconds == pytest.approx(clock.flops / gpu.rate("bf16"))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_products_in_fp8_have_a_share_of_their_own(precision):
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    clock = Roofline(H100, replace(PEAKS, gemm=0.5, gemm_quantised=0.25))
    with clock:
        ops.gemm(x, weight, precision)
    share = {"bf16": 0.5, "fp8": 0.25}[precision]
    assert clock.seconds == pytest.approx(clock.flops / (share * H100.rate(precision)))


class Operations(TorchDispatchMode):
    """Counts those that write a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)]
        self.count += result.untyped_storage()._cdata not in given
        return result


def test_without_torch_compile_gelu_is_the_operations_of_megatrons_own():
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    y, bias = (torch.randn(*size, requires_grad=True) for size in ((8, 64), (64,)))
    gradient = torch.ones(8, 64)
    with Operations() as eager:
        bias_gelu_impl(y, bias).backward(gradient)
    config = {"add_bias_linear": True, "activation_func": "gelu", "bias_activation_fusion": True}
    kernels = []
    for compiles in (True, False):
        asked = job(config=config, num_gpus=1, torch_compile=compiles)
        kernels_alone = Efficiency(kernel_us=1e3, bandwidth=1e3, gemm=1e3)
        profile = profile_job(asked, H100, kernels_alone, only=())
        none = profile.kinds[0].record("none")
        kernels.append(round(none.forward_ms + none.backward_ms))
    into_main_gradient = 1
    assert kernels[1] - kernels[0] == eager.count + into_main_gradient - 2


def test_gradients_are_added_in_the_dtype_that_they_are_kept_in():
    slow = Efficiency(bandwidth=1e-6)
    fp32, bf16 = (
        profile_job(
            job(num_gpus=1, accumulate_allreduce_grads_in_fp32=each), H100, slow, only=()
        ).embedding.backward_ms
        for each in (True, False)
    )
    read_and_written = 2 * (4 - 2) * 128 * 64  # bytes of the vocabulary's table
    assert fp32 - bf16 == pytest.approx(read_and_written / H100.bandwidth_bytes * 1e9, rel=1e-3)


ENDS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "expert_model_parallel_size": 8,
    "moe_grouped_gemm": True,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize("pipeline", [1, 4])
def test_beside_nothing_ep_overlap_hides_nothing(pipeline):
    """Every kernel and every collective takes 1 ms: two all-to-alls of tokens and one of their
    weights in a layer's forward, and as many in its backward, run beside many more kernels."""
    fields = {**ENDS, "pipeline_model_parallel_size": pipeline}
    if pipeline > 1:
        fields |= {"virtual_pipeline_model_parallel_size": 2}
    quick = replace(PEAKS, collective_us=1e3, kernel_us=1e3)
    boundless = replace(H100, bandwidth_bytes=1e30, link_bytes=1e30, network_bytes=1e30)
    steps, ends = [], []
    for overlap in (False, True):
        config = {**fields, "overlap_moe_expert_parallel_comm": overlap}
        asked = job(config=config, num_gpus=8 * pipeline, global_batch_size=64)
        profile = profile_job(asked, boundless, quick, only=())
        none = profile.kinds[0].record("none")
        steps.append(none.forward_ms + none.backward_ms)
        ends.append(profile.step_end_ms)
    hidden = steps[0] - steps[1]
    assert hidden == pytest.approx(6 * (1 - TAKEN_BY_NCCL), abs=0.01)
    alone = {1: 1, 4: 2 * 3 + 4 + 1}[pipeline]  # chunks, of 8 layers or of one
    layers = {1: 8, 4: 1}[pipeline]
    assert ends[1] - ends[0] == pytest.approx(alone * layers * hidden, rel=0.01)


def job(**fields):
    config = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    data = {
        "name": "a job",
        "config": {**config, **fields.pop("config", {})},
        **{"num_gpus": 8, "global_batch_size": 8, "seq_length": 64, "vocab_size": 128},
        **fields,
    }
    return job_from(data, "a job")


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_end_of_a_step_is_collectives_that_nothing_hides_and_adams_bytes(overlaps):
    asked = job(overlap_grad_reduce=overlaps, overlap_param_gather=overlaps)
    count = 10**9
    parameters = Parameters(dense=Trained(count))
    found = step_end_ms(asked, H100, replace(PEAKS, step_ms=7), parameters, 1e3, 1e3)
    # Gradients in fp32 are reduced, bf16 weights gathered: all of them, or one bucket of 4e7.
    sent = 4e7 if overlaps else count
    collectives_ms = (4 + 2) * sent * 7 / 8 / 450e9 * 1e3
    adam_ms = (42 * count / 8 + 12 * count) / 3350e9 * 1e3
    assert found == pytest.approx(7 + collectives_ms + adam_ms)


def test_a_short_backward_hides_only_its_own_time_of_the_reduction():
    asked = job()
    count = 10**9
    long, short = (
        step_end_ms(asked, H100, PEAKS, Parameters(dense=Trained(count)), 1e3, ms)
        for ms in (1e3, 1.0)
    )
    reduction_ms = 4 * count * 7 / 8 / 450e9 * 1e3
    bucket_ms = 4 * 4e7 * 7 / 8 / 450e9 * 1e3
    assert short - long == pytest.approx(reduction_ms - 1.0 - bucket_ms)


def test_muon_iterates_over_every_matrix_that_it_trains():
    x = torch.empty(96, 32, device="meta").mT  # the shorter side first
    with FlopCounterMode(display=False) as counter:
        gram = x @ x.mT
        torch.addmm(x, torch.addmm(gram, gram, gram), x)
    assert iteration_flops(96, 32) == iteration_flops(32, 96) == counter.get_total_flops()

    class Attention(torch.nn.Module):
        query_projection_size, kv_projection_size = 128, 32  # of two ranks

        def __init__(self):
            super().__init__()
            self.linear_qkv = torch.nn.Linear(8, 96, bias=False, device="meta")

    experts = torch.nn.Parameter(torch.empty(4, 96, 32, device="meta"))
    experts.allreduce = False
    model = torch.nn.ModuleList([Attention(), torch.nn.Linear(8, 8, device="meta")])
    model.register_parameter("experts", experts)
    count = counted_weights(model).total
    assert count.expert.iteration_flops == 4 * iteration_flops(96, 32)
    assert (count.expert.matrices, count.dense.matrices) == (4, 4)
    rows = (64, 16, 16, 8)  # query, key, value, and the other weight
    assert count.dense.iteration_flops == sum(iteration_flops(each, 8) for each in rows)

    # The host starts 35 operations and calls 9 functions for each of 4 + 4 matrices; without the
    # distributed optimizer every rank does all of them.
    slow = replace(PEAKS, host_us=1, module_us=100)
    found = {
        ranks: step_end_ms(
            job(optimizer=optimizer, use_distributed_optimizer=shared),
            H100,
            slow,
            count,
            1e3,
            1e3,
        )
        for ranks, optimizer, shared in ((0, "adam", True), (1, "muon", False), (8, "muon", True))
    }
    each_ms = (35 + 9 * 100) * 1e-3
    assert found[1] - found[0] == pytest.approx(8 * each_ms, abs=0.01)
    assert found[8] - found[0] == pytest.approx(2 * each_ms, abs=0.01)
