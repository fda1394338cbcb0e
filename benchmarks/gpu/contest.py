"""One job under one strategy after another: peaks, times, our profile and our plans.

Used by every part that trains in this process. Budgets are bytes that torch may allocate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Case, built
from megatron_autorecompute.compat import model_layers, rules, stage_layout
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost, evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Model, Parallelism, Profile
from megatron_autorecompute.report.recorded import recorded_step
from megatron_autorecompute.runtime import layer_checkpoints
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.measurement import Measurement
from megatron_autorecompute.runtime.model_shard import ModelShard, choices
from megatron_autorecompute.runtime.samples import lower_quartile

CORRECTIONS = 4
"""How often a plan that does not fit when run is corrected before it is reported as not fitting."""
RECORDED_STEPS = 3
HISTORY = 1_000_000
"""Events of the allocator that torch keeps; a step has some thousand for each layer."""
FRAGMENTS = 0.01
"""Of the budget: what a plan gives back after running out of memory below its predicted peak."""

OWN = (
    *("full+keep[core_attn]", "full+keep[dispatch]", "selective[moe]+keep[dispatch]"),
    *("selective[experts]", "selective[ln_out]", "selective[mlp_act]", "selective[qkv]"),
)
"""Every part and module that Megatron's checkpoints lack; plans measure some only if asked."""


def own_choices(layers: Sequence[torch.nn.Module]) -> list[LayerPolicy]:
    """The choices of `OWN` that all the layers have and can run."""
    every = map(LayerPolicy.parse, OWN)
    return [choice for choice in every if all(_can_run(layer, choice) for layer in layers)]


def _can_run(layer: Any, choice: LayerPolicy) -> bool:
    try:
        lacks = any(layer_checkpoints.idle_in(layer, choice, 0))
    except PolicyError:
        return False
    return not lacks and rules.is_allowed(layer.config, choice)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of one step under a strategy."""

    policy: str
    allocated_bytes: int
    reserved_bytes: int | None
    """What the allocator took from the device; None off CUDA."""
    retries: int
    """How often the allocator had to give memory back and ask again."""
    out_of_memory: bool
    seconds: float

    def fits(self, budget_bytes: int) -> bool:
        """Whether the step went through within the budget."""
        return not self.out_of_memory and self.allocated_bytes <= budget_bytes


class Contest:
    """A job and what is asked of it."""

    def __init__(self, case: Case, tries: int = 3) -> None:
        self.case, self.tries = case, tries
        self.job = built(case)
        self.num_layers = stage_layout.num_policy_layers(self.job.config)
        self.layout = Layout.from_flags(case.shape.num_layers, 1)
        self.schedule = Schedule(1, 1, case.shape.num_microbatches)
        with self.job.strategy("megatron:uniform/1"):
            for _ in range(2):  # allocates what stays: optimizer state, shared buffers
                self.job.step()

    def policy(self, text: str) -> RecomputePolicy:
        """Policy text, Megatron's named strategies included."""
        return self.job.policy(text)

    def choices(self) -> list[LayerPolicy]:
        """What all layers have, and, where ours reruns less, the same as Megatron reruns it."""
        layers = [layer for layer, _ in model_layers.numbered_layers(self.job.chunks)]
        shared = [c for c in choices(layers[0]) if all(c in choices(layer) for layer in layers)]
        shared += own_choices(layers)
        whole = [choice.as_megatron for choice in shared if not choice.own]
        return list(dict.fromkeys([*shared, *whole]))

    # --- what a strategy takes ---

    def peak(self, text: str) -> Peak:
        """One step under a strategy, with whether the device ran out of memory."""
        begin = time.perf_counter()
        before = self._retries()
        with self.job.strategy(text):
            if self.job.on_cuda:
                torch.cuda.empty_cache()
            allocated, out_of_memory = self.job.peak_bytes()
        reserved = torch.cuda.max_memory_reserved() if self.job.on_cuda else None
        seconds = time.perf_counter() - begin
        retries = self._retries() - before
        return Peak(text, allocated, reserved, retries, out_of_memory, seconds)

    def _retries(self) -> int:
        return torch.cuda.memory_stats()["num_alloc_retries"] if self.job.on_cuda else 0

    def times_ms(self, text: str, steps: int | None = None) -> list[float]:
        """Times of steps under a strategy, in a row."""
        times = []
        with self.job.strategy(text):
            for _ in range(steps or self.tries):
                begin = time.perf_counter()
                self.job.step()
                times.append((time.perf_counter() - begin) * 1e3)
        return times

    def in_turns(self, texts: list[str], rounds: int) -> dict[str, list[float]]:
        """Times of strategies that take turns, every round beginning with the next one.

        The first step of a turn is not counted: it settles the allocator after the switch.
        """
        times: dict[str, list[float]] = {text: [] for text in texts}
        for number in range(rounds):
            start = number % len(texts)
            for text in texts[start:] + texts[:start]:
                times[text] += self.times_ms(text, 2)[1:]
        return times

    def settled(self, text: str, steps: int) -> dict[str, Any]:
        """Bytes and times of a policy once what its first step learns is known, and host memory.

        Device bytes are those that a step takes above what is there when it begins.
        """
        with apply(self.policy(text), self.job.chunks, holder="the benchmark") as applied:
            warm_up_peak, out_of_memory = self.job.peak_bytes()
            if out_of_memory:
                return {"policy": text, "out_of_memory": True}
            self.job.step()
            self.job.optimizer.zero_grad()
            at_rest = torch.cuda.memory_allocated() if self.job.on_cuda else 0
            peak, out_of_memory = self.job.peak_bytes()
            times = []
            for _ in range(steps):
                begin = time.perf_counter()
                self.job.step()
                times.append((time.perf_counter() - begin) * 1e3)
            host = applied.host_memory()
        return {
            "policy": text,
            "out_of_memory": out_of_memory,
            "warm_up_peak_bytes": warm_up_peak,
            "at_rest_bytes": at_rest,
            "peak_bytes": peak,
            "step_ms": times,
            "pinned_bytes": host.pinned_bytes,
            "waiting_bytes": host.waiting_bytes,
        }

    # --- ours ---

    def profile(self, memory: Callable[[], Any] | None = None) -> Profile:
        """Every choice measured in ordinary steps: bytes, by `memory` or as usual, and times."""
        job, shape = self.job, self.case.shape
        memory = memory or job.memory
        with apply(self.policy("full"), job.chunks, holder="the benchmark") as applied:
            measurement = Measurement(ModelShard(job.chunks), applied)
            for _ in measurement.policies():
                with memory() as reader, measurement.watch(reader, times=False):
                    job.step()
            for is_timed in measurement.turns(microbatches=shape.num_microbatches):
                with measurement.watch(None, times=is_timed):
                    job.step()
            dtype = "bfloat16" if shape.bf16 else "float32"
            profile = measurement.profile(
                Model("GPT", shape.num_layers, facts=asdict(shape)),
                Parallelism(shape.micro_batch_size, shape.seq_length, dtype=dtype),
                job.static(),
            )
        # What libraries keep on the device from the first step on, cuBLAS its workspaces.
        job.optimizer.zero_grad()
        kept = torch.cuda.memory_allocated() if job.on_cuda else 0
        others = max(0, kept - job.static().total_bytes)
        [stage] = profile.stages
        return replace(
            profile,
            stages=(
                replace(stage, residual_bytes=stage.residual_bytes + others, others_bytes=others),
            ),
        )

    def cost(self, profile: Profile, policy: RecomputePolicy) -> PolicyCost:
        """What the planner predicts for any policy."""
        return evaluate(profile, self.layout, self.schedule, policy)

    def plan(self, profile: Profile, budget_bytes: int) -> dict[str, Any]:
        """Our plan within a budget, run, and corrected while it does not fit when run.

        Raises: InfeasibleError when not even the leanest policy is predicted to fit.
        """
        corrections = 0
        while True:
            solution = solve(Problem(profile, self.layout, self.schedule).at(budget_bytes))
            predicted = solution.cost.stages[0].peak.bytes
            peak = self.peak(solution.policy.format())
            if peak.fits(budget_bytes) or corrections == CORRECTIONS:
                break
            corrections += 1
            profile = _corrected(profile, predicted, peak, budget_bytes)
        return {
            **asdict(peak),
            "predicted_bytes": predicted,
            "predicted_ms": solution.cost.step_ms,
            "fits": peak.fits(budget_bytes),
            "corrections": corrections,
        }

    def record_memory(self, profile: Profile, folder: Path) -> dict[str, Any] | None:
        """Torch's memory history of some steps under our plan, held against the plan.

        The budget is halfway between what the leanest and the fastest plan need. The plan and the
        history stay in the folder, for `megatron-autorecompute report PLAN --snapshot HISTORY`.

        Returns:
            Planned and recorded bytes of the step's parts; None off CUDA.
        """
        if not self.job.on_cuda:
            return None
        problem = Problem(profile, self.layout, self.schedule)
        lean, fast = problem.stages.leanest[0].peak_bytes, problem.stages.fastest[0].peak_bytes
        plan = make_plan(problem.at((lean + fast) // 2))
        plan.save(folder / f"{self.case.name}.plan.json")
        history = folder / f"{self.case.name}.rank0.pickle"
        with self.job.strategy(plan.policy.format()):
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY)
            try:
                for _ in range(RECORDED_STEPS):
                    self.job.step()
                torch.cuda.memory._dump_snapshot(str(history))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        step = recorded_step(plan, history)
        return {
            "policy": plan.policy.format(),
            "plan": f"{self.case.name}.plan.json",
            "history": history.name,
            "moments": [asdict(moment) for moment in step.moments],
        }

    def rest_ms(self, profile: Profile) -> float:
        """What a step takes besides forward and backward (the optimizer): what the leanest and the
        richest of our policies both show, in turns; never negative."""
        measured = self.in_turns(["full", "none"], 3 * self.tries)
        left = (
            lower_quartile(ms) - self.cost(profile, self.policy(text)).step_ms
            for text, ms in measured.items()
        )
        return max(0.0, min(left))


def _corrected(profile: Profile, predicted: int, peak: Peak, budget_bytes: int) -> Profile:
    """The profile with what its prediction missed, or with room for the fragments it left out."""
    missed = max(peak.allocated_bytes - predicted, 0)
    if peak.out_of_memory:
        missed = max(missed, int(FRAGMENTS * budget_bytes))
    return _with_residual(profile, missed)


def _with_residual(profile: Profile, more_bytes: int) -> Profile:
    [stage] = profile.stages
    stage = replace(stage, residual_bytes=stage.residual_bytes + more_bytes)
    return replace(profile, stages=(stage,))
