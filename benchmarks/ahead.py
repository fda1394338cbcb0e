"""What recompute ahead saves: in real pipelines against the replay's prediction, and in plans.

    python -m benchmarks.ahead

Every stage is a gloo process that runs Megatron's own schedule on CPU. A layer sleeps for its
forward and twice as long for its backward, so that two cores stand for any number of devices. The
tables are written to `benchmarks/results/ahead.md`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_autorecompute.cli.estimate import default_budget_bytes
from megatron_autorecompute.cli.jobs import EXAMPLES
from megatron_autorecompute.meta.devices import device as gpu_of
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.job import job_from, read_description
from megatron_autorecompute.meta.meta_step import (
    build_chunks,
    build_gpt,
    run_step,
)
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import replay_ms
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.planner.search.stage_problem import EARLY
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import GIB
from scripts.tables import markdown
from testing.meta_stages import TokenStep
from testing.ranks import run_ranks

RESULTS = Path(__file__).parent / "results" / "ahead.md"
Place = tuple[int, int]
"""A stage, and one of its chunks."""
CASES: tuple[tuple[int, int | None, int, Place | None], ...]
CASES = ((2, None, 4, None), (4, None, 8, None), (8, None, 8, None), (8, None, 16, None))
CASES += ((2, None, 4, (0, 0)), (2, 2, 2, (0, 1)), (4, 2, 4, (1, 0)), (4, 2, 8, (0, 1)))
CASES += ((8, 2, 8, (6, 0)), (8, 2, 16, (1, 1)))
"""Stages, chunks of a stage (None: one), microbatches, and which chunk takes twice as long. Each
saves 3.9% of its step or more: steps of one policy differ by up to 0.5%, so that the 1% that
stages of several equal chunks save tells nothing."""
LAYER_MS = 80.0
LAYERS = 2
"""Of a stage."""
REPEATS = 3
WIDTH, TOKENS, VOCABULARY = 16, 8, 32
CPU = torch.device("cpu")
HEADER = ("stages", "chunks", "microbatches", "twice as long", "`full` ms", "`full+ahead` ms")
HEADER += ("saved", "predicted", "saved / predicted")
PLANNED, GPU = ("llama3-70b", "llama31-405b", "deepseek-v3"), "h100-80gb"
BUDGETS_GIB = (34, 36, 40, 44)
PLAN_HEADER = ("profile", "stages", "chunks", "microbatches", "budget GiB", "step ms", "ahead ms")
PLAN_HEADER += ("layers ahead", "less")
ABOUT = f"""# Recompute that begins in waits

Written by `python -m benchmarks.ahead`.

Real pipelines: {LAYERS} layers a stage, each {LAYER_MS:.0f} ms of sleep in a forward and twice that
in a backward, twice as long in one chunk of a stage (counted from 0); the shortest of {REPEATS}
steps. Saved and predicted: shares of the step with `full`, real and replayed.

{{}}
Plans in the model, without and with `--choices ahead`:

{{}}"""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def _chunks(pp: int, vpp: int | None) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp
    )
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS * pp,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=vpp is not None,
        deallocate_pipeline_outputs=vpp is None,
    )
    return build_chunks(config, _shape(0), build_gpt, CPU)


def _shape(num_microbatches: int) -> StepShape:
    return StepShape(TOKENS, 1, num_microbatches, VOCABULARY)


def _slow(layer: Any, ms: float) -> None:
    forward = layer.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        hidden, context = forward(*args, **kwargs)
        return _Sleep.apply(hidden, ms / 1e3), context

    layer.forward = slow


def _step_ms(models: list[Any], num_microbatches: int) -> float:
    shape = _shape(num_microbatches)
    forward_step = TokenStep(shape, CPU)
    torch.distributed.barrier()
    start = time.perf_counter()
    run_step(models, shape, forward_step)
    torch.distributed.barrier()
    return (time.perf_counter() - start) * 1e3


def measured(pp: int, vpp: int | None, num_microbatches: int, slow: Place | None) -> list[float]:
    """Of this rank: the shortest step with `full` and with `full+ahead`, ms."""
    warnings.simplefilter("ignore")
    from megatron_autorecompute.runtime.apply import apply

    models = _chunks(pp, vpp)
    for chunk, model in enumerate(models):
        times = 2 if (torch.distributed.get_rank(), chunk) == slow else 1
        for layer in model.decoder.layers:
            _slow(layer, LAYER_MS * times)
    texts = ("full", "full+ahead")
    found: dict[str, list[float]] = {text: [] for text in texts}
    with apply("full", models) as applied:
        _step_ms(models, num_microbatches)
        for text in texts * REPEATS:  # by turns, because the machine is not always as fast
            applied.switch(text)
            found[text].append(_step_ms(models, num_microbatches))
    return [min(found[text]) for text in texts]


def predicted(pp: int, vpp: int | None, num_microbatches: int, slow: Place | None) -> float:
    """The share of the step with `full` that the replay says is saved."""
    v = vpp or 1
    schedule, times = Schedule(pp, v, num_microbatches), np.full((pp, v), LAYER_MS * LAYERS / v)
    if slow is not None:
        times[slow] *= 2
    forward, backward, ahead = times, 3 * times, times.copy()
    ahead[-1, -1] = 0
    plain = replay_ms(schedule, forward, backward)
    return 1 - replay_ms(schedule, forward, backward, ahead) / plain


def pipelines() -> Iterator[tuple[Any, ...]]:
    """The rows of the first table."""
    for pp, vpp, m, slow in CASES:
        plain, early = run_ranks(measured, pp, pp, vpp, m, slow, timeout_s=600)[0]
        yield row(pp, vpp, m, slow, plain, early)


def row(
    pp: int,
    vpp: int | None,
    num_microbatches: int,
    slow: Place | None,
    plain: float,
    early: float,
) -> tuple[Any, ...]:
    """Of the table, from the steps in ms with `full` and with `full+ahead`."""
    saved, said = 1 - early / plain, predicted(pp, vpp, num_microbatches, slow)
    longer = "no chunk" if slow is None else f"stage {slow[0]}, chunk {slow[1]}"
    times = f"{plain:.0f}", f"{early:.0f}", f"{saved:.2%}", f"{said:.2%}"
    return (pp, vpp or 1, num_microbatches, longer, *times, f"{saved / said:.2f}")


def plans() -> Iterator[tuple[Any, ...]]:
    """The rows of the second table: by the profiles that come with the package, whose budget is
    that of the example, and of the same layers in another pipeline."""
    for name in PLANNED:
        job = job_from(read_description(EXAMPLES / f"{name}.yaml"), name)
        budget = default_budget_bytes(gpu_of(GPU), None, job)
        yield _row(name, _profile(name), job.layout(), job.schedule(), budget)
    for gib in BUDGETS_GIB:
        profile = _profile(PLANNED[0])
        layout = Layout.from_flags(profile.model.num_layers, 8)
        yield _row(PLANNED[0], profile, layout, Schedule(8, 1, 16), gib * GIB)


def _profile(name: str) -> Profile:
    return Profile.load(EXAMPLES / f"{name}.{GPU}.json")


def _row(
    name: str, profile: Profile, layout: Layout, schedule: Schedule, budget: int
) -> tuple[Any, ...]:
    problem = Problem(profile, layout, schedule, budget)
    plain, early = (solve(replace(problem, allowed=a)) for a in (None, (EARLY,)))
    begun = sum(choice.ahead for choice in early.policy.layers)
    less = 1 - early.cost.step_ms / plain.cost.step_ms
    shape = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    times = (f"{found.cost.step_ms:.1f}" for found in (plain, early))
    return (name, *shape, f"{budget / GIB:.1f}", *times, begun, f"{less:.2%}")


def main() -> None:
    """Write both tables."""
    tables = [markdown(HEADER, pipelines()), markdown(PLAN_HEADER, plans())]
    RESULTS.write_text(ABOUT.format(*tables))


if __name__ == "__main__":
    main()
