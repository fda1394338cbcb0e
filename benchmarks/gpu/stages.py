"""Part 11: every stage of a real job's pipeline, alone on this device, in Megatron's own schedule.

The other ranks are those of torch's fake process groups: collectives and messages between stages
move nothing and take no time. What each forward and backward takes goes into a replay of the
schedule.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.gpu.results import Ledger
from megatron_autorecompute.cli.estimate import default_budget_bytes
from megatron_autorecompute.cli.jobs import EXAMPLES
from megatron_autorecompute.meta.devices import device as gpu_of
from megatron_autorecompute.meta.fake_ranks import StepShape, fake_ranks
from megatron_autorecompute.meta.job import Job, job_from, read_description
from megatron_autorecompute.meta.meta_step import build_chunks, run_step
from megatron_autorecompute.meta.model import (
    JobStep,
    add_main_gradients,
    megatron_config,
    refusals,
    step_shape,
)
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.one_device import build
from megatron_autorecompute.patched import patched, patched_environ
from megatron_autorecompute.planner.cost.step_time import replay_ms
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.step_memory import is_out_of_memory

EXAMPLE, GPU = "llama3-70b", "h100-80gb"
TINY: dict[str, Any] = {
    "num_layers": 16,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "cross_entropy_loss_fusion": False,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
}
"""Of the config, in a dry run."""
STEPS = 2
"""Timed under every policy, after one that is not."""


def job_of(tiny: bool) -> Job:
    """The job, or its likeness for a dry run."""
    described = read_description(EXAMPLES / f"{EXAMPLE}.yaml")
    if tiny:
        small = {"num_gpus": 4, "global_batch_size": 4, "seq_length": 32, "vocab_size": 256}
        config = {**described["config"], **TINY}
        described = {**described, **small, "config": config, "transformer_impl": "local"}
    return job_from(described, EXAMPLE)


def stages(ledger: Ledger, options: Namespace) -> None:
    """Each stage under Megatron's best setting and ours, and what a step takes by a replay."""
    job = job_of(options.tiny)
    plans = ledger.item("plans", lambda: _plans(job, options.tiny))
    texts = {name: plan["policy"] for name, plan in plans.items()}
    for number in range(job.size("pipeline")):
        ledger.item(f"stage/{number}", lambda number=number: _stage(job, number, texts))
    ledger.item("steps", lambda: _replayed(job, ledger.section.items, texts))


def _plans(job: Job, tiny: bool) -> dict[str, dict[str, Any]]:
    profile, budget = _profile(job, tiny)
    ours, own = (
        make_plan(Problem(one, job.layout(), job.schedule(), budget))
        for one in (profile, profile.as_megatron())
    )
    manual = own.best_manual
    assert manual is not None  # full fits wherever a plan does
    layers = profile.num_layers
    policy = RecomputePolicy.parse(manual.name, num_layers=layers, layout=_chunks(own))
    return {
        manual.name: _predicted(ours, policy),
        "ours, of Megatron's choices": _predicted(ours, own.policy),
        "ours": _predicted(ours, ours.policy),
    }


def _profile(job: Job, tiny: bool) -> tuple[Profile, int]:
    if not tiny:
        budget = default_budget_bytes(gpu_of(GPU), None, job)
        return Profile.load(EXAMPLES / f"{EXAMPLE}.{GPU}.json"), budget
    profile = profile_job(job, gpu_of(GPU))
    stages = Problem(profile, job.layout(), job.schedule()).stages
    ends = [max(one.peak_bytes for one in found) for found in (stages.leanest, stages.fastest)]
    return profile, sum(ends) // 2


def _chunks(plan: Plan) -> list[tuple[int, ...]]:
    return [chunk.layers for stage in plan.layout.stages for chunk in stage]


def _predicted(plan: Plan, policy: RecomputePolicy) -> dict[str, Any]:
    cost = plan.problem().cost(policy)
    return {
        "policy": policy.format(),
        "step_ms": cost.step_ms,
        "busy_ms": [stage.busy_ms for stage in cost.stages],
        "peak_bytes": [stage.peak.bytes for stage in cost.stages],
    }


def _replayed(job: Job, items: dict[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Milliseconds of a step under each policy that every stage had memory for."""
    every = [items[f"stage/{number}"] for number in range(job.size("pipeline"))]
    return {
        name: replay_ms(
            job.schedule(),
            [stage[name]["forward_ms"] for stage in every],
            [stage[name]["backward_ms"] for stage in every],
        )
        for name in names
        if not any(stage[name]["out_of_memory"] for stage in every)
    }


# --- a stage on this device -----------------------------------------------------------------------


def _stage(job: Job, number: int, texts: dict[str, str]) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    with _built(job, number, device) as (models, run):
        for name, text in texts.items():
            policy = RecomputePolicy.parse(text, num_layers=job.num_layers)
            with apply(policy, models, groups=()):
                found[name] = _measured(run, _Clock(models), job.num_microbatches)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


@contextlib.contextmanager
def _built(
    job: Job, number: int, device: torch.device
) -> Iterator[tuple[list[torch.nn.Module], Callable[[], None]]]:
    """The chunks of a stage, and what runs a step of them."""
    quiet = patched_environ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    with quiet, build.megatron_on(device), refusals(job):
        config = megatron_config(job, {}, build.left_out(job))
        build.set_for_the_device(config, job)
        shape = step_shape(job, job.num_microbatches)
        with fake_ranks(config, number, shape):
            build.seed()

            def made(config: Any, *where: Any) -> torch.nn.Module:
                return build.chunk(config, *where, job=job, device=device)

            models = build_chunks(config, shape, made, device)
            parameters = [p for model in models for p in model.parameters()]
            gradients = add_main_gradients(parameters, dummies=job.fuses_weight_gradients)
            yield models, functools.partial(_step, models, shape, JobStep(job, device), gradients)


def _step(
    models: list[torch.nn.Module],
    shape: StepShape,
    forward_step: JobStep,
    gradients: list[torch.Tensor],
) -> None:
    run_step(models, shape, forward_step)
    for gradient in gradients:
        gradient.zero_()


def _measured(run: Callable[[], None], clock: _Clock, num_microbatches: int) -> dict[str, Any]:
    on_cuda = torch.cuda.is_available()
    try:
        run()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with clock.watching():
            for _ in range(STEPS):
                run()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": True}
    peak = torch.cuda.max_memory_allocated() if on_cuda else None
    times = clock.times_ms()
    busy = num_microbatches * sum(sum(own) for own in times.values())
    return {"out_of_memory": False, "peak_bytes": peak, "busy_ms": busy, **times}


class _Clock:
    """When forwards and backwards of a stage's chunks begin and end, on the device.

    Args:
        models: the chunks.
    """

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._chunk_of = {id(model): chunk for chunk, model in enumerate(models)}
        # By output: Megatron's backward_step is told no chunk.
        self._outputs = WeakIdKeyDictionary()
        self._forwards: list[list[tuple[Any, Any]]] = [[] for _ in models]
        self._backwards: list[list[tuple[Any, Any]]] = [[] for _ in models]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In this block Megatron's schedules are watched."""
        from megatron.core.pipeline_parallel import schedules

        forward, backward = schedules.forward_step, schedules.backward_step

        def watched_forward(step: Any, iterator: Any, model: Any, *args: Any, **kw: Any) -> Any:
            chunk, begin = self._chunk_of[id(model)], _now()
            result = forward(step, iterator, model, *args, **kw)
            self._forwards[chunk].append((begin, _now()))
            self._outputs[next(iter(tree_iter(result)))] = chunk
            return result

        def watched_backward(given: Any, output: Any, *args: Any, **kw: Any) -> Any:
            chunk, begin = self._outputs[next(iter(tree_iter(output)))], _now()
            result = backward(given, output, *args, **kw)
            self._backwards[chunk].append((begin, _now()))
            return result

        with (
            patched(schedules, "forward_step", watched_forward),
            patched(schedules, "backward_step", watched_backward),
        ):
            yield

    def times_ms(self) -> dict[str, list[float]]:
        """The median of each chunk's forwards, and of its backwards."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {
            "forward_ms": [_median_ms(spans) for spans in self._forwards],
            "backward_ms": [_median_ms(spans) for spans in self._backwards],
        }


def _now() -> Any:
    """An event on the device, or seconds where there is none."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _median_ms(spans: list[tuple[Any, Any]]) -> float:
    on_cuda = torch.cuda.is_available()
    return statistics.median(
        begin.elapsed_time(end) if on_cuda else 1e3 * (end - begin) for begin, end in spans
    )
