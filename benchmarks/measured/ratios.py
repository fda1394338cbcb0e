"""Published ratios of a step with a recompute setting to one without, and ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import Job, job_from
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.roofline import Communication
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, Profile

GPU = "h100-80gb"
ROOT = Path(__file__).parents[2]
LAYER = "benchmarks/results/gpu/3/llama3-70b.profile.json"
"""What `profile --device cuda` measured of one layer."""
COMMON: dict[str, Any] = {
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "bias_activation_fusion": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA3_70B: dict[str, Any] = {
    **COMMON,
    **{"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672},
    **{"num_attention_heads": 64, "num_query_groups": 8, "sequence_parallel": True},
    **{"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4},
    "virtual_pipeline_model_parallel_size": 5,
}
MOE: dict[str, Any] = {
    **COMMON,
    **{"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"},
    **{"expert_tensor_parallel_size": 1, "moe_router_load_balancing_type": "aux_loss"},
    "moe_router_dtype": "fp32",
}
MLA: dict[str, Any] = {
    **MOE,
    **{"multi_latent_attention": True, "kv_lora_rank": 512, "qk_head_dim": 128},
    **{"qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True},
}
MOONLIGHT: dict[str, Any] = {
    **MLA,
    **{"num_layers": 27, "hidden_size": 2048, "ffn_hidden_size": 11264},
    **{"num_attention_heads": 16, "q_lora_rank": None, "num_moe_experts": 64},
    **{"moe_router_topk": 6, "moe_ffn_hidden_size": 1408, "apply_rope_fusion": False},
    **{"moe_shared_expert_intermediate_size": 2816, "moe_layer_freq": [0] + [1] * 26},
    **{"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8},
    **{"sequence_parallel": True},
}
DEEPSEEK: dict[str, Any] = {
    **MLA,
    **{"num_layers": 14, "hidden_size": 7168, "ffn_hidden_size": 18432},
    **{"num_attention_heads": 128, "q_lora_rank": 1536, "num_moe_experts": 256},
    **{"moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "mtp_num_layers": 1},
    **{"moe_shared_expert_intermediate_size": 2048, "moe_layer_freq": [0] * 3 + [1] * 11},
    **{"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 16},
    "pipeline_model_parallel_layout": "Ett|(tt|)*6mL",
    "virtual_pipeline_model_parallel_size": 2,
}
QWEN3: dict[str, Any] = {
    **MOE,
    **{"num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "kv_channels": 128},
    **{"num_attention_heads": 32, "num_query_groups": 4, "qk_layernorm": True},
    **{"num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768},
    **{"expert_model_parallel_size": 16},
}
OURS: dict[str, Any] = {
    **{"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    **{"add_bias_linear": False, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    **{"gradient_accumulation_fusion": False, "masked_softmax_fusion": False},
}


@dataclass(frozen=True, slots=True)
class Published:
    """Settings of one job, and their steps relative to the first."""

    name: str
    source: str
    job: Job
    base: str
    steps: dict[str, float]
    """By setting: of any unit, or the reciprocal of throughput; the base is among them."""


def published() -> Iterator[Published]:
    """Every job with published ratios."""
    yield Published(
        "Llama3-70B SFT, fp8, 32 H100",
        "NeMo Megatron-Bridge, skills/mbridge-perf-activation-recompute: TFLOP/s",
        _job("llama3-70b", LLAMA3_70B, 32, 32, 4096, 128256, precision="fp8"),
        "selective[core_attn]",
        {
            "selective[core_attn]": 1 / 704,
            "selective[mlp]": 1 / 593.6,
            "selective[core_attn+mlp]": 1 / 586.8,
        },
    )
    yield Published(
        "DeepSeek-V3 with 14 layers, EP 16, 64 H100",
        "Megatron-LM#6311: TFLOP/s",
        _job("deepseek-v3-14", DEEPSEEK, 64, 256, 2048, 129280),
        "none",
        {"none": 1 / 225.1, "uniform/1": 1 / 184.2},
    )
    yield Published(
        "Qwen3-30B-A3B, EP 16, 16 H100",
        "Megatron-Bridge#3880",
        _job("qwen3-30b-a3b", QWEN3, 16, 1024, 4096, 151936),
        "none",
        {"none": 42.21, "selective[core_attn]": 42.92},
    )
    yield Published(
        "Moonlight-16B, one microbatch, 8 H100",
        "NeMo Megatron-Bridge, docs of activation recompute (#5570)",
        _job("moonlight", MOONLIGHT, 8, 4, 4096, 163840),
        "none",
        {
            "none": 457.18,
            "selective[core_attn]": 474.80,
            "selective[mla_up_proj]": 480.89,
            "selective[mla_up_proj+mlp]": 496.73,
            "selective[moe_act]": 466.26,
            "selective[layernorm+moe_act]": 506.53,
        },
    )
    unfused: dict[str, Any] = {"micro_batch_size": 8, "transformer_impl": "local", "te_version": ""}
    unfused["position_embedding_type"] = "learned_absolute"
    yield Published(
        "350M, unfused attention, one H100",
        "our own, benchmarks/results/gpu/1",
        _job("gpt-350m", OURS, 1, 16, 1024, 50304, **unfused),
        "none",
        {"none": 338.8, "selective[core_attn]": 437.9, "uniform/1": 460.6, "uniform/2": 456.7},
    )


def _job(
    name: str, config: dict[str, Any], gpus: int, batch: int, length: int, words: int, **more: Any
) -> Job:
    data = {
        "name": name,
        "config": {key: value for key, value in config.items() if value is not None},
        **{"num_gpus": gpus, "global_batch_size": batch, "seq_length": length},
        **{"vocab_size": words, **more},
    }
    return job_from(data, name)


def predicted() -> list[dict[str, Any]]:
    """Every published ratio beside ours."""
    return [*(row for one in published() for row in ratios(one)), *layers()]


def layers() -> Iterator[dict[str, Any]]:
    """The same of one layer that one H100 measured, without its modelled communication."""
    measured = Profile.load(str(ROOT / LAYER))
    job = job_from(measured.model.facts["job"], LAYER)
    gpu = device(GPU)
    whole, between = profile_job(job, gpu), profile_job(job, gpu, clock_type=Communication)

    def alone_ms(choice: str) -> float:
        return _ms(whole, choice) - _ms(between, choice)

    def measured_ms(choice: str) -> float:
        return _ms(measured, choice) - _record(measured, choice).communication_ms

    def as_it_ran(choice: str) -> str:  # by Megatron's own checkpoints
        return str(LayerPolicy.parse(choice).as_megatron)

    for record in measured.kinds[0].choices:
        if record.choice != "none":
            yield {
                "job": "Llama3-70B, tp 2, forward and backward of a layer, one H100",
                "source": f"our own, {LAYER}",
                "base": "none",
                "setting": record.choice,
                "published": round(measured_ms(record.choice) / measured_ms("none"), 4),
                "predicted": round(alone_ms(as_it_ran(record.choice)) / alone_ms("none"), 4),
            }


def _ms(profile: Profile, choice: str) -> float:
    record = _record(profile, choice)
    return record.forward_ms + record.backward_ms


def _record(profile: Profile, choice: str) -> ChoiceRecord:
    kind = profile.kinds[0]
    found = kind.record(choice) or kind.record(kind.inert[choice])
    assert found is not None, choice
    return found


def ratios(one: Published) -> Iterator[dict[str, Any]]:
    """Of one job."""
    models = _models(one)
    base_ms = _step_ms(models[one.base], one.base)
    for setting, step in one.steps.items():
        if setting != one.base:
            yield {
                "job": one.name,
                "source": one.source,
                "base": one.base,
                "setting": setting,
                "published": round(step / one.steps[one.base], 4),
                "predicted": round(_step_ms(models[setting], setting) / base_ms, 4),
            }


def _models(one: Published) -> dict[str, Problem]:
    """By setting. Every profile has none and full beside its own set of modules."""
    modules = {name: LayerPolicy.parse(name).modules for name in one.steps if "[" in name}
    found = {}
    for name, own in (modules or {one.base: ()}).items():
        profile = profile_job(one.job, device(GPU), only=own)
        found[name] = Problem(profile, one.job.layout(), one.job.schedule())
    return {name: found.get(name, next(iter(found.values()))) for name in one.steps}


def _step_ms(model: Problem, setting: str) -> float:
    """A whole step under one of Megatron's settings."""
    profile = model.profile
    layers = profile.model.num_layers
    chunks = [[i for i in chunk if i < layers] for chunk in model.layout.chunk_layers()]
    policy = RecomputePolicy.parse(
        f"megatron:{setting}", num_layers=profile.num_layers, layout=chunks
    )
    return model.cost(policy).step_ms + profile.step_end_ms
