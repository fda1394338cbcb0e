"""Hold NVIDIA's hand-tuned recipes against the planner, without a device; write a page.

python scripts/nvidia_recipes.py [--only NAME] [--output benchmarks/results/nvidia_recipes.md]
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from rich.progress import track  # noqa: E402

from megatron_autorecompute.cli.estimate import default_budget_bytes  # noqa: E402
from megatron_autorecompute.errors import AutorecomputeError  # noqa: E402
from megatron_autorecompute.meta.devices import Device, device  # noqa: E402
from megatron_autorecompute.meta.job import Job, job_from  # noqa: E402
from megatron_autorecompute.meta.profiling import profile_job  # noqa: E402
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost  # noqa: E402
from megatron_autorecompute.planner.search.problem import Problem  # noqa: E402
from megatron_autorecompute.planner.search.solve import try_solve  # noqa: E402
from megatron_autorecompute.policy import RecomputePolicy  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "benchmarks" / "data" / "nvidia_tuned_recipes.csv"
RESULTS = ROOT / "benchmarks" / "results"

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
}
MLA: dict[str, Any] = {
    **LLAMA,
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
}


@dataclass(frozen=True)
class KnownModel:
    """Dimensions of a public model, and what they were checked against."""

    config: dict[str, Any]
    vocab_size: int
    checked: str
    more: dict[str, Any]


BF16_MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
MODELS = {
    "llama3_8b": KnownModel(
        {
            **LLAMA,
            "num_layers": 32,
            "hidden_size": 4096,
            "ffn_hidden_size": 14336,
            "num_attention_heads": 32,
            "num_query_groups": 8,
        },
        128256,
        "Llama3ModelProvider8B of Megatron Bridge 0.3.1; vocabulary: its "
        "perf_recipes/llama/b200/llama3.py of August 2026",
        {},
    ),
    "llama3_70b": KnownModel(
        {
            **LLAMA,
            "num_layers": 80,
            "hidden_size": 8192,
            "ffn_hidden_size": 28672,
            "num_attention_heads": 64,
            "num_query_groups": 8,
        },
        128256,
        "Llama3ModelProvider70B of Megatron Bridge 0.3.1; vocabulary: its "
        "perf_recipes/llama/b200/llama3.py of August 2026",
        {},
    ),
    "deepseek_v3": KnownModel(
        {
            **MLA,
            "num_layers": 61,
            "hidden_size": 7168,
            "ffn_hidden_size": 18432,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "num_moe_experts": 256,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
            "moe_layer_freq": [0] * 3 + [1] * 58,
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_router_topk_scaling_factor": 2.5,
        },
        129280,
        "DeepSeekV3ModelProvider of Megatron Bridge 0.3.1; heads and MLA's sizes: the defaults of "
        "DeepseekV3Config in transformers 4.57.6. Vocabulary padded as in Bridge (1280 x tp)",
        {**BF16_MOMENTS, "make_vocab_size_divisible_by": 1280},
    ),
    "gpt_oss_120b": KnownModel(
        {
            **LLAMA,
            "num_layers": 36,
            "hidden_size": 2880,
            "ffn_hidden_size": 2880,
            "num_attention_heads": 64,
            "num_query_groups": 8,
            "kv_channels": 64,
            "num_moe_experts": 128,
            "moe_router_topk": 4,
            "moe_ffn_hidden_size": 2880,
            "window_size": [127, 0],
            "window_attn_skip_freq": 2,
            "apply_rope_fusion": False,
            "add_bias_linear": True,
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
        },
        201088,
        "GPTOSSProvider120B of Megatron Bridge 0.3.1; biases, clamped SwiGLU, sink, window and "
        "unfused rotary embedding as in Bridge's gpt_oss_bridge.py and "
        "perf_recipes/gpt_oss/common.py of August 2026. The vocabulary is the public one, where "
        "its performance recipes train with Llama 3's 128256",
        {},
    ),
    "moonlight_16b": KnownModel(
        {
            **MLA,
            "num_layers": 27,
            "hidden_size": 2048,
            "ffn_hidden_size": 11264,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "num_moe_experts": 64,
            "moe_router_topk": 6,
            "moe_ffn_hidden_size": 1408,
            "moe_shared_expert_intermediate_size": 2816,
            "moe_layer_freq": [0] + [1] * 26,
            "moe_router_topk_scaling_factor": 2.446,
            "apply_rope_fusion": False,
        },
        163840,
        "MoonlightModelProvider16B of Megatron Bridge 0.3.1, but for the vocabulary: 163840, which "
        "the recipe of August 2026 pads to",
        {**BF16_MOMENTS, "make_vocab_size_divisible_by": 1280},
    ),
    "qwen3_30b_a3b": KnownModel(
        {
            **LLAMA,
            "num_layers": 48,
            "hidden_size": 2048,
            "ffn_hidden_size": 6144,
            "num_attention_heads": 32,
            "num_query_groups": 4,
            "kv_channels": 128,
            "qk_layernorm": True,
            "num_moe_experts": 128,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 768,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
            "moe_permute_fusion": True,
        },
        151936,
        "Qwen3MoEModelProvider30B_A3B of Megatron Bridge 0.3.1",
        {},
    ),
}
PRECISIONS = {
    "bf16": "bf16",
    "fp8_cs": "fp8",
    "fp8_sc": "fp8_block",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
}
DEVICES = {"h100": "h100-80gb", "b200": "b200-180gb"}
LORA = {"lora_rank": 16, "lora_target_modules": ["linear_qkv"]}
"""Of Bridge's perf_recipes/llama (llama3_70b_peft_*), rank by recipes/llama/h100/llama3.py."""


def number(text: str) -> int | None:
    """An integer, None where the cell is empty."""
    return int(text) if text else None


def uncovered(row: dict[str, str]) -> str | None:
    """Why a recipe is not covered, or None."""
    if row["megatron_fsdp"] == "True":
        reason = "Megatron FSDP shards weights and gradients, which is not modelled"
        moved = "; layers moved to the host are in offload_recipes.md"
        return reason + (moved if row["cpu_offloading_num_layers"] else "")
    return None


def job(row: dict[str, str]) -> Job:
    """The recipe as a job."""
    known = MODELS[row["model"]]
    sizes = {
        "tensor_model_parallel_size": number(row["tp"]),
        "pipeline_model_parallel_size": number(row["pp"]),
        "virtual_pipeline_model_parallel_size": number(row["vpp"]),
        "context_parallel_size": number(row["cp"]),
        "expert_model_parallel_size": number(row["ep"]),
        "expert_tensor_parallel_size": number(row["etp"]) or (1 if row["ep"] != "1" else None),
        "sequence_parallel": row["sp"] == "True",
        "mtp_num_layers": number(row["mtp_layers"]),
        "pipeline_model_parallel_layout": row["pp_layout"] or None,
        "overlap_moe_expert_parallel_comm": row["ep_a2a_overlap"] == "True",
        "cuda_graph_impl": row["cuda_graph_impl"],
        "cuda_graph_scope": re.findall(r"\w+", row["cuda_graph_scope"]),
    }
    if row["moe_dispatcher"] in ("deepep", "hybridep"):
        sizes["moe_token_dispatcher_type"] = "flex"
        sizes["moe_flex_dispatcher_backend"] = row["moe_dispatcher"]
    precision = PRECISIONS[row["dtype"]]
    data = {
        "name": row["recipe"].removesuffix("_config"),
        "config": {**known.config, **sizes},
        "num_gpus": number(row["num_gpus"]),
        "seq_length": number(row["seq"]),
        "micro_batch_size": number(row["mbs"]),
        "global_batch_size": number(row["gbs"]),
        "vocab_size": known.vocab_size,
        "precision": precision,
        "fp8_param_gather": precision != "fp8_block",
        "accumulate_allreduce_grads_in_fp32": False,
        "disable_parameter_transpose_cache": row["task"] in ("sft", "peft"),
        **(LORA if row["task"] == "peft" else {}),
        **known.more,
    }
    return job_from(data, row["recipe"])


def setting(row: dict[str, str]) -> str:
    """NVIDIA's recompute setting in the policy grammar."""
    if row["recompute_granularity"] == "full":
        return f"megatron:{row['recompute_method']}/{row['recompute_num_layers']}"
    if row["recompute_granularity"] == "selective":
        return f"megatron:selective[{row['recompute_modules']}]"
    return "megatron:none"


def evaluated(model: Problem, text: str) -> PolicyCost:
    """The cost of a Megatron setting on the planner's layout."""
    layers = model.profile.model.num_layers
    chunks = [[i for i in chunk if i < layers] for chunk in model.layout.chunk_layers()]
    policy = RecomputePolicy.parse(text, num_layers=model.profile.num_layers, layout=chunks)
    return model.cost(policy)


def line(row: dict[str, str]) -> list[str] | str:
    """One line of the table, or why there is none."""
    if reason := uncovered(row):
        return reason
    try:
        return compared(row)
    except AutorecomputeError as error:
        return f"{type(error).__name__}: {error}"


def problem_of(asked: Job, gpu: Device) -> Problem:
    """The problem of the job's own layout and schedule."""
    return Problem(profile_job(asked, gpu), asked.layout(), asked.schedule())


def peak_bytes(cost: PolicyCost) -> int:
    """Of the fullest stage."""
    return max(stage.peak_high_bytes for stage in cost.stages)


def compared(row: dict[str, str]) -> list[str]:
    """One line of the table."""
    asked = job(row)
    gpu = device(DEVICES[row["gpu"]])
    budget = default_budget_bytes(gpu, None, asked)
    model = problem_of(asked, gpu)
    theirs = evaluated(model, setting(row))
    ours = try_solve(model.at(budget))
    fits = peak_bytes(theirs) <= budget
    cells = [
        asked.name,
        setting(row).removeprefix("megatron:"),
        f"{budget / GIB:.1f}",
        f"{peak_bytes(theirs) / GIB:.1f}",
        "yes" if fits else "no",
        *parts_of(model, theirs),
        "" if fits else why(model, theirs, budget),
        f"{theirs.step_ms / 1e3:.2f}",
    ]
    if ours is None:
        lean = max(choice.peak_bytes for choice in model.stages.leanest)
        return [*cells, f"{lean / GIB:.1f}", "no", "", "", "nothing fits"]
    gain = 1 - ours.cost.step_ms / theirs.step_ms
    verdict = f"{gain:+.1%}" if fits else "theirs does not fit"
    return [
        *cells,
        f"{peak_bytes(ours.cost) / GIB:.1f}",
        "yes",
        f"{ours.cost.step_ms / 1e3:.2f}",
        verdict,
        summary(ours.policy),
    ]


PARTS = (
    *("weights", "gradients", "optimizer", "activations", "transients", "buffers"),
    "graphs",
)


def parts_bytes(model: Problem, cost: PolicyCost) -> dict[str, int]:
    """Bytes by PARTS at the peak of the fullest stage; they add up to it."""
    fullest = max(cost.stages, key=lambda stage: stage.peak_high_bytes)
    static = model.profile.stages[fullest.stage].static
    at_peak = fullest.peak.breakdown
    kept = static.parameter_bytes + static.gradient_bytes + static.optimizer_state_bytes
    return {
        "weights": static.parameter_bytes,
        "gradients": static.gradient_bytes,
        "optimizer": static.optimizer_state_bytes,
        "activations": at_peak.in_flight_bytes
        + at_peak.running_bytes
        + at_peak.embedding_head_bytes
        + at_peak.overhead_bytes,
        "transients": at_peak.transient_bytes,
        "buffers": at_peak.static_bytes - kept,
        "graphs": at_peak.graph_bytes,
    }


def parts_of(model: Problem, cost: PolicyCost) -> list[str]:
    """One cell of GiB for each of PARTS."""
    return [f"{size / GIB:.1f}" for size in parts_bytes(model, cost).values()]


def why(model: Problem, cost: PolicyCost, budget: int) -> str:
    """What a setting that does not fit lacks, when, and which part is the largest."""
    fullest = max(cost.stages, key=lambda stage: stage.peak_high_bytes)
    parts = parts_bytes(model, cost)
    largest = max(parts, key=lambda name: parts[name])
    over = (fullest.peak_high_bytes - budget) / GIB
    share = parts[largest] / fullest.peak.bytes
    return f"{over:.1f} over in {fullest.peak.moment}; {largest} are {share:.0%}"


def summary(policy: RecomputePolicy) -> str:
    """Layers per choice."""
    counts: dict[str, int] = {}
    for choice in policy.layers:
        counts[str(choice)] = counts.get(str(choice), 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{choice} x{count}" for choice, count in ordered)


HEADER = (
    *("recipe", "NVIDIA's setting", "budget GiB", "their peak", "fits", *PARTS, "why not"),
    "their step s",
    *("our peak", "fits", "our step s", "ours takes less by", "our layers"),
)


GAIN = HEADER.index("ours takes less by")
OURS_FIT = GAIN - 2


def table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


MEASURED_HEADER = (
    *("run", "modules", "first stage GB", "last stage GB", "without both GB", "measured GB"),
    *("last off by", "without both", "last stage's peak at"),
)
MEASURED_LLAMA = (
    ("", 4, 4, 5, 58.8),
    ("", 4, 4, 10, 60.2),
    ("core_attn", 4, 4, 5, 59.6),
    ("mlp", 4, 4, 5, 55.6),
    ("mlp+core_attn", 4, 4, 5, 55.6),
    ("", 4, 8, 5, 53.2),
    ("", 8, 4, 5, 50.2),
)
"""Modules, tp, pp, vpp, GB that NVIDIA measured; Llama3-70B SFT in fp8 on 32 H100. From
skills/nemo-mbridge-perf-memory-tuning and -perf-activation-recompute of Megatron Bridge, 2026.

What these call core_attn, the baseline, recomputes nothing: recipes/llama/llama3.py of March 2026
sets recompute_granularity to None, and TransformerConfig then lists core_attn, its default. The row
of core_attn is theirs of core_attn and layernorm, of which fused norms have none to recompute."""
DEFERRED = {
    "gradient_accumulation_fusion": True,
    "defer_embedding_wgrad_compute": True,
    "wgrad_deferral_limit": 22,
}
"""Of these runs: scripts/performance/configs/llama/llama3_llm_finetune.py of March 2026."""
MEASURED_QWEN = (("", False, 61.35), ("core_attn", False, 63.14), ("", True, 62.04))
"""Modules, whether EP overlap ran, GB that NVIDIA measured; Qwen3-30B-A3B in bf16 on 16 H100, with
alltoall and without CUDA graphs. From Megatron Bridge's pull request 3880, May 2026. Its recipe has
had the precision-aware optimizer since b6f644609 of August 2026 only."""
MEASURED_MOONLIGHT = (
    ("", 36.618),
    ("core_attn", 36.614),
    ("mla_up_proj", 35.902),
    ("mla_up_proj+mlp", 35.917),
    ("moe_act", 35.941),
    ("layernorm+moe_act", 35.949),
)


BLACKWELL = 10.0
"""Whose fp8 products need no transposes (`Device.needs_fp8_transposes`)."""
MeasuredRun = tuple[str, Job, str, float]
"""Name, job, modules, and the GB (10^9 bytes) that NVIDIA measured."""


def measured_runs() -> Iterator[MeasuredRun]:
    """What is predicted beside a measured peak."""
    for modules, tp, pp, vpp, measured_gb in MEASURED_LLAMA:
        sizes = {"tp": str(tp), "pp": str(pp), "vpp": str(vpp), "cp": "1", "ep": "1", "etp": ""}
        asked = job(base_row("llama3_70b", "fp8_cs", 32, "32", sizes))
        asked = replace(asked, config={**asked.config, **DEFERRED})
        yield f"Llama3-70B SFT tp{tp} pp{pp} vpp{vpp}", asked, modules, measured_gb
    sizes = {"tp": "1", "pp": "1", "vpp": "", "cp": "1", "ep": "16", "etp": "1", "sp": "False"}
    for modules, overlap, measured_gb in MEASURED_QWEN:
        row = base_row("qwen3_30b_a3b", "bf16", 16, "1024", sizes)
        asked = job({**row, "ep_a2a_overlap": str(overlap)})
        yield "Qwen3-30B-A3B" + ", EP overlap" * overlap, asked, modules, measured_gb
    sizes = {"tp": "2", "pp": "1", "vpp": "", "cp": "1", "ep": "8", "etp": "1"}
    for modules, measured_gb in MEASURED_MOONLIGHT:
        asked = job(base_row("moonlight_16b", "bf16", 8, "4", sizes))
        yield "Moonlight-16B", asked, modules, measured_gb


def base_row(model: str, dtype: str, gpus: int, gbs: str, sizes: dict[str, str]) -> dict[str, str]:
    """A row as in the CSV for the runs NVIDIA measured."""
    return {
        "recipe": model,
        "model": model,
        "gpu": "h100",
        "dtype": dtype,
        "task": "sft",
        "num_gpus": str(gpus),
        "sp": "True",
        "mbs": "1",
        "gbs": gbs,
        "seq": "4096",
        "mtp_layers": "",
        "pp_layout": "",
        "ep_a2a_overlap": "False",
        "moe_dispatcher": "",
        "cuda_graph_impl": "none",
        "cuda_graph_scope": "",
        **sizes,
    }


def measured_row(run: MeasuredRun) -> list[str]:
    """One line: predicted on the first and on the last stage, and there without deferred gradients
    and without transposes of fp8 weights; measured; differences of both; when the last is."""
    name, asked, modules, measured_gb = run
    text = f"megatron:selective[{modules}]" if modules else "megatron:none"
    config = {**asked.config, "defer_embedding_wgrad_compute": False}
    gpu = device("h100-80gb")
    without = problem_of(replace(asked, config=config), replace(gpu, capability=BLACKWELL))
    stages = evaluated(problem_of(asked, gpu), text).stages
    sizes = [one.peak.bytes / 1e9 for one in (stages[0], stages[-1])]
    sizes.append(evaluated(without, text).stages[-1].peak.bytes / 1e9)
    errors = [f"{size / measured_gb - 1:+.1%}" for size in sizes[1:]]
    shown = [f"{gb:.2f}" for gb in (*sizes, measured_gb)]
    return [name, f"[{modules}]", *shown, *errors, stages[-1].peak.moment]


def page(only: str | None, workers: Executor) -> str:
    """The page, with a line for every recipe; workers: where recipes are run."""
    with open(RECIPES, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not only or only in row["recipe"]]
    found = list(track(workers.map(line, rows), description="recipes", total=len(rows)))
    lines = [cells for cells in found if isinstance(cells, list)]
    named = zip((row["recipe"] for row in rows), found, strict=True)
    failed = [[name, reason] for name, reason in named if isinstance(reason, str)]
    parts = [INTRODUCTION, counted(rows, lines), "## Against measured peaks\n", MEASURED_TEXT]
    parts += [table(MEASURED_HEADER, list(workers.map(measured_row, measured_runs())))]
    parts += [MEASURED_EXPLAINED, ROWS, table(HEADER, lines)]
    parts += ["## Not covered\n", table(("recipe", "reason"), failed)]
    parts += ["## Dimensions\n", DIMENSIONS_TEXT, dimensions()]
    return "\n".join(parts)


def counted(rows: list[dict[str, str]], lines: list[list[str]]) -> str:
    """The result in one paragraph."""
    both = [line for line in lines if line[4] == "yes"]
    better = [line for line in both if line[GAIN] and not line[GAIN].startswith("-")]
    share = len(lines) / max(len(rows), 1)
    ours = sum(line[OURS_FIT] == "yes" for line in lines)
    return (
        f"{len(lines)} of {len(rows)} recipes covered ({share:.1%}). "
        f"NVIDIA's setting fits in {len(both)}; ours fits in {ours}. Where theirs fits, ours takes "
        f"no longer in {len(better)} of {len(both)}.\n"
    )


def dimensions() -> str:
    """What the models' dimensions were checked against."""
    return table(("model", "checked against"), [[n, m.checked] for n, m in MODELS.items()])


INTRODUCTION = """# NVIDIA's hand-tuned recipes, seen from a laptop

Written by `python scripts/nvidia_recipes.py` from `benchmarks/data/nvidia_tuned_recipes.csv`.
**Nothing is measured, except the column "measured GB".** `estimate` counts bytes and models times
([how](../../docs/estimate-model.md)). The step times compare choices; they do not predict
throughput. [A table](#every-recipe) has every recipe with both plans. Its columns from weights to
graphs are GiB at the peak of NVIDIA's own setting on its fullest stage, and add up to the peak.
Buffers are dummies of weight gradients, workspaces, and what layers keep between steps. Graphs are
what the memory pool of CUDA graphs adds.

For every recipe these are assumed:

- gradients in bf16, as Bridge's performance recipes set them (`grad_reduce_in_fp32=False`)
- bf16 Adam moments for DeepSeek-V3 and Moonlight, as their precision-aware optimizer has them
- even routing, and no bytes for the pools of CUDA graphs beside EP overlap
- for PEFT, LoRA of rank 16 on linear_qkv, as Bridge's recipes set it
- a budget of the device's memory less 5% and less what is assumed outside torch, the buffers of
  DeepEP or HybridEP included
"""
ROWS = "## Every recipe\n"
DIMENSIONS_TEXT = "`tests/bridge/test_no_device.py` and `tests/meta/test_job.py` compare these.\n"
MEASURED_TEXT = """NVIDIA published peaks of runs on H100, in GB of 10^9 bytes. The table compares
them with this model's predictions for the first and the last pipeline stage. "Without both" is the
last stage without two things: gradients of logits that wait for the pipeline to drain, and
transposes of fp8 weights.
"""
MEASURED_EXPLAINED = """None of what follows was verified on a device:

- **Qwen3-30B.** These runs are of May 2026. Since August 2026 (Bridge b6f644609) the recipe has
  the precision-aware optimizer, which keeps 2 bytes of each master weight instead of 4. With it
  the figures here would be 3.8 GB lower.
- **Moonlight.** NVIDIA's figures fall by 0.7 GB with `mla_up_proj` or `moe_act`, and then stay
  within 0.05 GB whatever else is recomputed. So something outside the layers sets the peak. In
  this model it is the optimizer step: Transformer Engine's FusedAdam copies the bf16 moments of one
  parameter group at a time to fp32, which takes 8 bytes for each of 1.80e9 expert weights. Two
  things are not explained. Only Transformer Engine before 2.14 makes these copies, and Bridge's
  uv.lock at these runs' commit (600d069b8) has 2.17.1. And the first two figures are 0.7 GB higher;
  uneven routing may be part of it.
- **Llama3-70B.** The figures are read as those of the last pipeline rank. Bridge wrote memory
  metrics on the last rank alone when these runs were made (its issue 3167), and two of the runs
  are marked "OOM on rank 0". Bridge's text calls the baseline `core_attn`, but the recipe of March
  2026 recomputes nothing. Six of the seven rows are near the measured ones without two things that
  sources say are there, and too high with them:

  - `defer_embedding_wgrad_compute` keeps the gradients of logits of up to 22 microbatches until the
    optimizer step (megatron-core tensor_parallel/layers.py): 4.7 GB of 15 at pp 4, 6.9 GB of 22 at
    pp 8
  - products on Hopper read transposes of fp8 weights in the backward, and Transformer Engine keeps
    them with fp8 weights, however `disable_parameter_transpose_cache` is set: 4.3 GB at tp 4 and
    pp 4, 2.1 GB at tp 8 or pp 8

  The seventh row, tp 8, is near with the transposes and too low without. The reports name neither
  the versions nor the whole config. This model keeps the larger figures, so that a plan fits in
  either case.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="recipes whose name contains this")
    parser.add_argument("--output", type=Path, default=RESULTS / "nvidia_recipes.md")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=context) as workers:
        args.output.write_text(page(args.only, workers), encoding="utf-8")
    print(f"Written to {args.output}.")


if __name__ == "__main__":
    main()
