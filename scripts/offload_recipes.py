"""Hold NVIDIA's recipes that offload activations against the planner; write a page.

python scripts/offload_recipes.py [--only NAME] [--output benchmarks/results/offload_recipes.md]

With megatron-core 0.19, for the hybrid models.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from megatron_autorecompute.meta.devices import device  # noqa: E402
from megatron_autorecompute.meta.job import Job, job_from  # noqa: E402
from megatron_autorecompute.meta.offload_records import with_whole_layers  # noqa: E402
from megatron_autorecompute.meta.profiling import profile_job  # noqa: E402
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost  # noqa: E402
from megatron_autorecompute.planner.search.manual import manual_policy  # noqa: E402
from megatron_autorecompute.planner.search.problem import Problem  # noqa: E402
from megatron_autorecompute.planner.search.solve import solve  # noqa: E402
from megatron_autorecompute.policy import MegatronStrategy, RecomputePolicy  # noqa: E402
from megatron_autorecompute.profile import StageRecord  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from nvidia_recipes import MODELS, PRECISIONS, summary, table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "offload_recipes.md"
RECIPES = ROOT / "benchmarks" / "data" / "offload_recipes.csv"
EXAMPLES = ROOT / "megatron_autorecompute" / "examples"
Row = dict[str, str]

LLAMA31_405B = {
    "num_layers": 126,
    "hidden_size": 16384,
    "ffn_hidden_size": 53248,
    "num_attention_heads": 128,
    "num_query_groups": 8,
}
"""All else is as in Llama 3 70B."""
NEMOTRON_3_ULTRA = {
    "hybrid_layer_pattern": "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*"
    "EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME/*E/*E",
    "hidden_size": 8192,
    "ffn_hidden_size": 5120,
    "num_attention_heads": 64,
    "mamba_num_heads": 256,
    "moe_ffn_hidden_size": 5120,
    "moe_latent_size": 2048,
    "moe_shared_expert_intermediate_size": 10240,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "cross_entropy_fusion_impl": "native",
    "pipeline_model_parallel_size": 1,
}
"""examples/post_training/modelopt/conf/nvidia of Megatron-LM, August 2026; all else is as in
Nemotron 3 Super."""
NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
LIGHTNING = {"hybrid_layer_pattern": f"{NANO_PATTERN}/*E/*E", "mtp_use_repeated_layer": True}
"""All else is as in Nemotron 3 Nano."""
BF16_MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
ATTENTION, EXPERTS, ACTIVATION = ("core_attn", "attn_proj"), ("expert_fc1",), ("moe_act",)
SETS = {
    "llama3_70b": [("qkv_linear", *ATTENTION)],
    "llama31_405b": [("qkv_linear", *ATTENTION)],
    "deepseek_v3": [ATTENTION, EXPERTS],
    "nemotron_3_ultra": [ACTIVATION, ATTENTION],
    "nemotron_3_5_lightning": [EXPERTS, ATTENTION],
}
"""What plans may offload, by model: sets of modules."""


def model_of(row: Row) -> dict[str, Any]:
    """Fields of a job that the model decides on."""
    name = row["model"]
    if name in MODELS or name == "llama31_405b":
        known = MODELS["deepseek_v3" if name == "deepseek_v3" else "llama3_70b"]
        config = known.config | (LLAMA31_405B if name == "llama31_405b" else {})
        if name == "deepseek_v3":
            flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
            config = {**config, **flex, "mtp_num_layers": 1}
        length = 4096 if name == "deepseek_v3" else 8192
        return {
            "config": config,
            "seq_length": length,
            "vocab_size": known.vocab_size,
            "accumulate_allreduce_grads_in_fp32": False,
            **known.more,
        }
    ultra = name == "nemotron_3_ultra"
    path = EXAMPLES / f"nemotron-3-{'super' if ultra else 'nano'}.yaml"
    job = yaml.safe_load(path.read_text())
    changed = NEMOTRON_3_ULTRA if ultra else LIGHTNING
    job |= {"config": job["config"] | changed, "accumulate_allreduce_grads_in_fp32": False}
    job["config"] = {k: v for k, v in job["config"].items() if not k.startswith("cuda_graph_")}
    return job if ultra else job | BF16_MOMENTS


def job_of(row: Row) -> Job:
    """The recipe as a job without Megatron FSDP, EP overlap and CUDA graphs."""
    model = model_of(row)
    tp, ep = int(row["tp"]), int(row["ep"])
    sizes = {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": int(row["pp"]),
        "pipeline_model_parallel_layout": row["layout"] or None,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1 if ep > 1 else None,
    }
    data = {
        **model,
        "name": row["recipe"],
        "config": {**model["config"], **{k: v for k, v in sizes.items() if v is not None}},
        "num_gpus": int(row["num_gpus"]),
        "micro_batch_size": int(row["mbs"]),
        "global_batch_size": int(row["gbs"]),
        "precision": PRECISIONS[row["dtype"]],
    }
    return job_from(data, row["recipe"])


def problem_of(row: Row) -> Problem:
    """Of the recipe; with whole layers where it offloads those."""
    job, gpu, sets = job_of(row), device(row["device"]), SETS[row["model"]]
    theirs = MegatronStrategy.parse(f"megatron:{row['setting']}").modules
    profile = profile_job(job, gpu, only=theirs or ("mlp",), offload=sets)
    if row["setting"].startswith("cpu_offloading"):
        profile = with_whole_layers(job, profile)
    return Problem(profile, job.layout(), job.schedule())


def line(row: Row) -> list[str]:
    """One line of the table."""
    problem = problem_of(row)
    setting = MegatronStrategy.parse(f"megatron:{row['setting']}")
    theirs = problem.cost(manual_policy(problem, setting))
    budgets = [stage.peak_high_bytes for stage in theirs.stages]
    link = problem.profile.host_link
    assert link is not None
    host_bytes = max(link.host_bytes, *(stage.host_bytes for stage in theirs.stages))
    problem = replace(
        problem, profile=replace(problem.profile, host_link=replace(link, host_bytes=host_bytes))
    )
    ours = solve(problem.at(budgets))
    plain_ms = ours.without_offload_ms or math.inf
    gain = 1 - ours.cost.step_ms / theirs.step_ms
    return [
        row["recipe"].replace("_pretrain", ""),
        f"`{row['setting']}`",
        f"{link.to_host_gb_per_s:g}",
        f"{max(map(without_static, problem.profile.stages, budgets)) / GIB:.1f}",
        *(f"{one:.2f}" for one in (theirs.step_ms / 1e3, theirs.stall_ms / 1e3)),
        host_gib(theirs),
        f"{ours.cost.step_ms / 1e3:.2f}",
        f"{max(gain, 0.0):.1%}",
        host_gib(ours.cost),
        f"{ours.step_evidence.gap or 0.0:.1%}",
        "nothing fits" if math.isinf(plain_ms) else f"{plain_ms / 1e3:.2f}",
        shown(ours.policy, row),
    ]


def without_static(stage: StageRecord, peak_bytes: int) -> int:
    """A peak without weights, gradients and optimizer states."""
    return peak_bytes - stage.static.total_bytes


def host_gib(cost: PolicyCost) -> str:
    """Host memory of the fullest device."""
    return f"{max(stage.host_bytes for stage in cost.stages) / GIB:.1f}"


def shown(policy: RecomputePolicy, row: Row) -> str:
    """A plan in few words."""
    texts = summary(policy).split(", ")
    moved = [text for text in texts if "cpu_offloading" in text]
    if moved:
        return f"`megatron:cpu_offloading/{moved[0].rpartition(' x')[2]}`"
    if len({str(choice) for choice in policy.layers}) == 1 and "offload" in row["setting"]:
        return f"all layers `{policy.layers[0]}`"
    return ", ".join(f"`{text.rpartition(' x')[0]}` x{text.rpartition(' x')[2]}" for text in texts)


PAGE = """# NVIDIA's recipes that offload activations

Written by `make offload-recipes`. **Nothing on this page is measured.** `estimate` counts bytes and
models times, and copies are replayed ([how](../../docs/offload.md#plan-with-it)).

These are Megatron Bridge's performance recipes of August 2026 that offload. A row compares NVIDIA's
own setting, the plan with offload allowed, and the plan without. Each plan may have the peak that
NVIDIA's setting needs on every stage in this model. It may take the host memory that `devices.json`
assumes, or what NVIDIA's setting takes if that is more.

{table}

On each layer the plan recomputes everything, nothing, or the modules that NVIDIA's setting
recomputes (the MLP where NVIDIA recomputes none). It offloads nothing or one of these sets of
modules:

{sets}

Where NVIDIA moves whole layers, `cpu_offloading/N` is allowed for every N. "Gap" says how much
shorter a step could be at most. Where copies hide, nothing is left to gain.

## What is assumed

- **Links and host memory** are those of [the table](../../docs/offload.md#plan-with-it). GB/s are
  of one device while its neighbours copy, both ways at once. `cpu_offloading` copies both ways on
  one stream, as Transformer Engine does.
- **Left out of every column**: Megatron FSDP and with it weights, gradients and optimizer states,
  CUDA graphs, EP overlap (`deepseek_v3_256gpu_gb200_fp8mx_partial_cg_dev`), paged stash of
  experts' activations (`…_hsdp`), and `fine_grained_offloading_max_inflight_offloads`, which lets
  a forward wait for its copies out.
- **Nemotron 3 Ultra** offloads only large tensors of `fused_group_mlp`. By size and by the recipe's
  own comment that is the input of the experts' activation, which is `moe_act` without the fused
  kernel.

## Not in the table

{rest}
"""
HEADER = (
    *("recipe", "NVIDIA's setting", "GB/s", "GiB", "step s", "of it waits", "host GiB"),
    *("planned s", "takes less by", "host GiB", "gap", "planned without offload s", "the plan"),
)


def sets_of_modules() -> str:
    """What plans may use, by model."""

    lines = [[name, ", ".join(f"`{'+'.join(one)}`" for one in sets)] for name, sets in SETS.items()]
    return table(("model", "sets of modules"), lines).rstrip()


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="recipes whose name contains this; no page is written")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with RECIPES.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (asked.only or "") in row["recipe"]]
    lines = []
    for row in rows:
        if not row["instead"]:
            lines.append(line(row))
            print(*lines[-1], sep=" | ", flush=True)
    if asked.only:
        return
    rest = [
        [row["recipe"], f"`{row['setting']}`", row["instead"]] for row in rows if row["instead"]
    ]
    page = PAGE.format(
        table=table(HEADER, lines).rstrip(),
        sets=sets_of_modules(),
        rest=table(("recipe", "setting", "why"), rest).rstrip(),
    )
    asked.output.write_text(page)


if __name__ == "__main__":
    main()
