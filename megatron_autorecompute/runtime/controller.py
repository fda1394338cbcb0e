"""`--recompute-policy auto` inside a job: measure, decide, agree, climb, watch.

Wrap every training step in `AutoTuner.step()`. The first steps are ordinary training steps that are
measured (`measuring`). Then one rank solves, all ranks follow (`decisions`), and from then on only
the peak is measured. This module does not import `megatron.training` or Megatron Bridge: `JobFacts`
has what it needs from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.auto_rules import refuse_unmeasurable
from megatron_autorecompute.runtime.climb import climb
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.fingerprint import fingerprint
from megatron_autorecompute.runtime.job_facts import JobFacts
from megatron_autorecompute.runtime.measuring import Measuring, Steps
from megatron_autorecompute.runtime.model_shard import ModelShard
from megatron_autorecompute.runtime.plan_in_force import PlanInForce
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.step_memory import StepMemory
from megatron_autorecompute.runtime.telling import tell

__all__ = ["AutoTuner", "JobFacts"]


class AutoTuner:
    """Finds, applies and watches the policy of one job; every rank makes one in the same way.

    Args:
        chunks: this rank's model chunks, built, without a policy.
        optimizer: Megatron's optimizer on them.
        options: the user's options.
        job: facts from the training program.

    Raises:
        AutorecomputeError: auto cannot measure this config, no budget can be found, or the plan
            path cannot be written.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        options: AutoOptions,
        job: JobFacts,
    ) -> None:
        self.optimizer, self.options, self.job = optimizer, options, job
        refuse_unmeasurable(model_layers.unwrapped(chunks[0]).config)
        self.shard = ModelShard(chunks)
        self.memory = StepMemory(self.shard.chunks, optimizer, job.without_cuda, job.memory)
        self.decisions = Decisions(self.shard, self.memory, options, job)
        self.fingerprint = self._fingerprint()
        self._store = PlanStore(options.recompute_plan_path, self.fingerprint, job.say)
        nothing = RecomputePolicy.parse("none", num_layers=self.shard.num_layers)
        self.applied = apply(nothing, self.shard.chunks, holder="--recompute-policy auto")
        self.applied.switch(self.decisions.leanest)
        self._in_force = PlanInForce(self.decisions, optimizer, self.applied, self._store)
        guard = self._in_force.guard
        self._measuring = Measuring(self.decisions, optimizer, self.applied, guard)
        self._course = self._steps()

    def _fingerprint(self) -> dict[str, str]:
        shapes = {f.name: str(getattr(self.job.parallelism, f.name)) for f in fields(Parallelism)}
        encoder_layers = self.shard.encoder_layers
        encoder = {"encoder_layers": str(encoder_layers)} if encoder_layers else {}
        device = "CPU" if self.job.without_cuda else torch.cuda.get_device_name()
        given = {**shapes, **self.job.shapes, **encoder, "device": device}
        return fingerprint(self.shard.chunks, self.optimizer, self.shard.layout, given)

    @property
    def steps(self) -> int:
        """How many training steps are done."""
        return self._in_force.guard.steps

    @property
    def peak_bytes(self) -> int:
        """The most bytes this rank allocated in the last measured step, or since its plan began."""
        return self.memory.peak_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step, forward to optimizer, on every rank."""
        with next(self._course):
            yield
        self._store.step_done()

    def close(self) -> None:
        """Stop, and leave the policy in force on the model."""
        self._course.close()
        self._store.close()

    def _steps(self) -> Steps:
        """All phases of the job, one context for each step."""
        plan = self.decisions.known_plan(self._store)
        if plan is None:
            ended_before = self._store.ended_measuring()
            profile = yield from self._measuring.run(self.fingerprint, ended_before)
            plan = yield from climb(profile, self.decisions, self._in_force)
            self._store.save(plan)
        elif not self.options.recompute_plan_only:
            self._in_force.run(plan, f"the plan in {self._store.path}")
            plan = yield from self._in_force.one_step(plan, reads_bytes=True)
        tell(plan, self.decisions, self.steps)
        if self.options.recompute_plan_only:
            raise SystemExit(0)
        yield from self._in_force.steps(plan)
