"""A recipe's step without a device. Needs Bridge: `make published-steps`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")  # Megatron and Bridge on a machine without CUDA, TE and Apex

from benchmarks.published import runs  # noqa: E402
from megatron_autorecompute.errors import AutorecomputeError  # noqa: E402
from megatron_autorecompute.meta.devices import Device  # noqa: E402
from megatron_autorecompute.meta.job import Job  # noqa: E402
from megatron_autorecompute.meta.job_config import GraphScope  # noqa: E402
from megatron_autorecompute.meta.profiling import profile_job  # noqa: E402
from megatron_autorecompute.planner.search.problem import Problem  # noqa: E402
from scripts import bridge_jobs, nvidia_recipes  # noqa: E402

Data = dict[str, Any]


def predicted(name: str) -> Data:
    """A recipe beside its published runs, or the reason why there is nothing to compare."""
    bridge_jobs.prepare()
    try:
        return _beside(name, runs.of_recipe(name, runs.with_cards()))
    except AutorecomputeError as error:
        return {"recipe": name, "reason": bridge_jobs.reason(str(error), name)}


def _beside(name: str, published: Sequence[runs.PublishedRun]) -> Data:
    gpu, job = bridge_jobs.gpu_of(name), bridge_jobs.job_of(name)
    sizes = runs.sizes(job)
    own = [run for run in published if not run.others(sizes)]
    if not own:
        return {"recipe": name, "reason": runs.unlike(runs.nearest(published, sizes), sizes)}
    return {
        "recipe": name,
        "gpu": gpu.name,
        "model": name.partition("_" + _task(name))[0],
        "family": family(job),
        "precision": job.precision,
        "setting": bridge_jobs.said_setting(job),
        "runs_with": runs_with(job),
        "sizes": sizes,
        "published": [{"release": run.release, "step_s": run.step_s} for run in own],
        "predicted_s": step_s(job, gpu),
    }


def step_s(job: Job, gpu: Device) -> float:
    """Seconds of a step of the recipe's own setting, its optimizer and its gradients' collectives
    included."""
    selective = job.config.get("recompute_granularity") == "selective"
    modules = job.config.get("recompute_modules") or () if selective else ()
    profile = profile_job(job, gpu, only=modules)
    model = Problem(profile, job.layout(), job.schedule())
    cost = nvidia_recipes.evaluated(model, bridge_jobs.setting(job))
    return (cost.step_ms + profile.step_end_ms) / 1e3


def family(job: Job) -> str:
    """What kind of model a job trains, and whether as LoRA."""
    if job.lora_rank:
        return "LoRA"
    if job.pattern is not None:
        return "hybrid"
    return "MoE" if job.config.get("num_moe_experts") else "dense"


def runs_with(job: Job) -> str:
    """Of the recipe what decides a step beside its sizes: CUDA graphs, dispatcher, overlap."""
    config = job.config
    flex = config.get("moe_token_dispatcher_type") == "flex"
    found = [
        _graphs(job.graphs),
        str(config.get("moe_flex_dispatcher_backend") or "flex") if flex else "",
        "EP overlap" if config.get("overlap_moe_expert_parallel_comm") else "",
        "TP overlap" if config.get("tp_comm_overlap") else "",
    ]
    return ", ".join(each for each in found if each)


def _graphs(scope: GraphScope) -> str:
    if scope.implementation == "none":
        return ""
    of_layers = f": {'+'.join(scope.modules) or 'layers'}" if scope.of_layers else ""
    return f"graphs {scope.implementation}{of_layers}"


def _task(name: str) -> str:
    return next(task for task in runs.TASKS.values() if f"_{task}_" in name)
