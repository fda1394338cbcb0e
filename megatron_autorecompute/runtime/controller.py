"""`auto` inside a job: measure, decide, agree, climb, watch.

Wrap every training call of Megatron's schedule in `Auto.schedule`, or surround it with `Auto.step`.
The first calls are ordinary ones that are measured (`measuring`). Then one rank solves, all ranks
follow (`decisions`), and from then on only the peak is measured. `attach` makes an `Auto`, in every
training program. This module does not import `megatron.training` or Megatron Bridge: `JobFacts` has
what it needs from them.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.errors import ApplyError, OptionError
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.report.terminal import imbalance_lines, measured_step_view, stages_view
from megatron_autorecompute.runtime import offload
from megatron_autorecompute.runtime.apply import apply, blocks
from megatron_autorecompute.runtime.auto_options import (
    AHEAD_CHOICES,
    MEGATRONS_CHOICES,
    AutoOptions,
    refuse_for_auto,
)
from megatron_autorecompute.runtime.calls import SeenTokens
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.fingerprint import fingerprint
from megatron_autorecompute.runtime.job_facts import JobFacts
from megatron_autorecompute.runtime.measuring import SETTLING_STEPS, Measuring, Steps
from megatron_autorecompute.runtime.model_shard import ModelShard, choices, megatrons
from megatron_autorecompute.runtime.plan_in_force import PlanInForce, Step, climb
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.ranks import all_reduce_max
from megatron_autorecompute.runtime.step_memory import StepMemory
from megatron_autorecompute.units import GIB, gib

__all__ = ["Auto", "JobFacts"]

Function = Callable[..., Any]
_LOOK_UP = "get_forward_backward_func"
WIDTH = 100
"""Columns of a plan as text; a log has no terminal width."""


class Auto:
    """Finds, applies and watches the policy of one job; every rank makes one in the same way, from
    chunks without a policy.

    Raises AutorecomputeError: auto cannot measure this config, a policy is in force on the model,
    no budget can be found, or the plan path cannot be written.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], optimizer: Any, options: AutoOptions, job: JobFacts
    ) -> None:
        self.optimizer, self.options, self.job = optimizer, options, job
        refuse_for_auto(options, model_layers.unwrapped(chunks[0]).config)
        self.shard = self._shard(chunks)
        varies = job.calls is not None
        self.memory = StepMemory(self.shard.chunks, optimizer, job.without_cuda)
        self.decisions = Decisions(self.shard, self.memory, options, job)
        self.fingerprint = self._fingerprint()
        self._store = PlanStore(options.recompute_plan_path, self.fingerprint, job.say)
        nothing = RecomputePolicy.parse("none", num_layers=self.shard.num_layers)
        holder = "attach(), whose close() ends it" if varies else "--recompute-policy auto"
        self.applied = apply(nothing, self.shard.chunks, holder=holder)
        try:
            self._begin()
        except BaseException:
            self.applied.undo()
            raise

    def _begin(self) -> None:
        self.applied.switch(self.decisions.leanest)
        self._in_force = PlanInForce(self.decisions, self.applied, self._store)
        chunks = self.shard.chunks
        split = self.shard.config.tensor_model_parallel_size
        split = split if self.shard.config.sequence_parallel else 1
        self._seen = SeenTokens(chunks if self.job.calls is not None else [], split)
        self._measuring = Measuring(self.decisions, self._in_force, self._seen)
        self._course = self._steps()
        self._closed = self._inside = False
        self._watched: list[tuple[Any, Function, Function]] = []
        """Modules with what they had, and what they have instead."""
        self._ended: BaseException | None = None
        """The error that ended the course."""
        self._named = blocks(chunks)
        self._own = {id(module) for chunk in chunks for module in chunk.modules()}

    def _shard(self, chunks: Sequence[torch.nn.Module]) -> ModelShard:
        """This rank's model, with choices that offload if they are allowed, and with Megatron's
        alone if no other is."""
        measured = offload.measured if self.options.recompute_allow_offload else choices
        if self.options.recompute_choices == MEGATRONS_CHOICES:
            measured = functools.partial(megatrons, measured)
        if not self.options.recompute_allow_offload:
            return ModelShard(chunks, choices_of=measured)
        config = model_layers.unwrapped(chunks[0]).config
        _, other_layers = model_layers.first_block(chunks)
        varies = self.job.calls is not None
        offload.refuse(config, blocks=1 + bool(other_layers), varies=varies)
        shard = ModelShard(chunks, choices_of=measured)
        if not any(choice.offload for kind in shard.kinds for choice in kind.choices):
            raise OptionError(
                "--recompute-allow-offload was given, and no layer of this model has a module that "
                "Megatron can offload with this config. Leave the flag out."
            )
        return shard

    def _fingerprint(self) -> dict[str, str]:
        shapes = {f.name: str(getattr(self.job.parallelism, f.name)) for f in fields(Parallelism)}
        encoder_layers = self.shard.encoder_layers
        encoder = {"encoder_layers": str(encoder_layers)} if encoder_layers else {}
        device = "CPU" if self.job.without_cuda else torch.cuda.get_device_name()
        allowed = {"offload": "allowed"} if self.options.recompute_allow_offload else {}
        asked = self.options.recompute_choices
        allowed |= {} if asked == AHEAD_CHOICES else {"choices": asked}
        given = {**shapes, **self.job.shapes, **encoder, **allowed, "device": device}
        return fingerprint(self.shard.chunks, self.optimizer, self.shard.layout, given)

    # --- what the training loop calls -------------------------------------------------------------

    def schedule(self, forward_backward: Function) -> Function:
        """Megatron's schedule function, with `step` around its training calls.

        Calls with `forward_only`, without gradients, or on another model (a critic) pass through:
        they are neither counted nor measured.

        forward_backward: what `get_forward_backward_func()` returned. One that was wrapped before
        is returned as it is.
        """
        if getattr(forward_backward, "auto", None) is self:
            return forward_backward

        @functools.wraps(forward_backward)
        def call(*args: Any, **named: Any) -> Any:
            passes = self._closed or named.get("forward_only") or not torch.is_grad_enabled()
            if passes or not self._is_own(named.get("model")):
                return forward_backward(*args, **named)
            with self.step(num_microbatches=named.get("num_microbatches")):
                return forward_backward(*args, **named)

        setattr(call, "auto", self)  # noqa: B010  # mypy knows no attributes of functions
        return call

    def watch(self, module: Any) -> None:
        """`schedule` for a framework's module, without a change in it: until `close`, the name
        `get_forward_backward_func` in it gives Megatron's schedule as `schedule` returns it.

        Raises: OptionError if the module has no such name."""
        plain = getattr(module, _LOOK_UP, None)
        if plain is None:
            raise OptionError(
                f"{getattr(module, '__name__', module)} has no {_LOOK_UP}: watch() needs the "
                "module that imported it from megatron.core.pipeline_parallel."
            )

        def look_up() -> Function:
            return self.schedule(plain())

        setattr(module, _LOOK_UP, look_up)
        self._watched.append((module, plain, look_up))

    def _is_own(self, model: Any) -> bool:
        """Whether this is a model that we are attached to, however it is wrapped; so is None."""
        chunks = [model] if isinstance(model, torch.nn.Module) else model or []
        modules = itertools.chain.from_iterable(chunk.modules() for chunk in chunks)
        return model is None or any(id(module) in self._own for module in modules)

    def tokens(self, tokens: Sequence[int]) -> None:
        """Say the lengths of the next training call, on every rank; forgotten after it.

        Where all ranks say them, the call runs a plan for its own longest microbatch, also above
        `max_tokens`. Otherwise it runs the plan for `max_tokens`.

        tokens: of each microbatch on this rank, as the model is given it: after padding, and after
        context parallelism has split it; with a vision tower, as its decoder is.

        Raises OptionError: not a positive number for each microbatch; or this auto knows no
        lengths, because a training program with one length made it.
        """
        if self.job.calls is None:
            raise OptionError("This job's microbatches have one length: there is nothing to say.")
        self.job.calls.say(tokens)

    @contextmanager
    def step(self, *, num_microbatches: int | None = None) -> Iterator[None]:
        """Around one training call of the schedule, or one training step, on every rank.

        num_microbatches: how many this call has, if the loop knows; ranks may differ.

        Raises:
            ApplyError: this object was closed, an error ended it, or a call runs already.
            OptionError: `tokens` was given another number of microbatches, or every call of the
                job has another one.
            AutorecomputeError: as `measuring` and `plan_in_force` say.
        """
        if self._closed:
            raise ApplyError("close() ended this auto. Call attach() to make another one.")
        if self._inside:
            raise ApplyError(
                "A training call began inside another one. Surround each by schedule() or step(), "
                "not by both, and in one thread at a time."
            )
        self._inside = True
        try:
            self._agree(num_microbatches)
            with self._next_step(), self._seen.counting():
                yield
        finally:
            self._inside = False

    def _next_step(self) -> Step:
        if self._ended is not None:
            raise ApplyError(
                f"An error ended this auto ({type(self._ended).__name__}: {self._ended}). To train "
                "on without it, close() it, which gives the model back."
            ) from self._ended
        try:
            return next(self._course)
        except BaseException as error:
            self._ended = error
            raise

    def _agree(self, num_microbatches: int | None) -> None:
        in_force, calls = self._in_force, self.job.calls
        if calls is None:
            asked = self.job.num_microbatches()
            if num_microbatches not in (None, asked):
                raise OptionError(
                    f"This call has {num_microbatches} microbatches, and every call of this job "
                    f"was said to have {asked}."
                )
            (in_force.outcome,) = all_reduce_max(in_force.own_outcome)
            return
        in_force.outcome = calls.agree(
            num_microbatches,
            in_force.own_outcome,
            self._seen.longest,
            *in_force.missed_and_short_bytes(),
        )
        self._seen.forget()

    def close(self) -> None:
        """Stop, and give the model back as it was; a second call does nothing.

        Raises: ApplyError while a training call runs."""
        if self._closed:
            return
        if self._inside:
            raise ApplyError(
                "close() inside a training call, whose backward needs the policy in force: close "
                "after it."
            )
        self._closed = True
        self._course.close()
        self._seen.close()
        for module, plain, look_up in reversed(self._watched):
            if getattr(module, _LOOK_UP) is look_up:  # not wrapped again by another
                setattr(module, _LOOK_UP, plain)
        self.applied.undo()
        self.job.on_close()
        self.job.say(f"recompute auto: {self._outcome()}")

    def _outcome(self) -> str:
        """The plan and where it was saved, or why there is none."""
        where = self._store.close() or f"not saved: {self.options.PATH} was not given"
        if self._store.plan is not None:
            return f"the plan is {self._store.plan.policy.format(self._named)}, {where}"
        if self._ended is not None:
            return f"no plan: an error ended it ({type(self._ended).__name__})"
        if self._measuring.is_over_budget:
            return "no plan: even under the leanest policy, no step kept the budget"
        measured = SETTLING_STEPS + self.options.recompute_measure_steps
        return (
            f"no plan: training ended after {self.steps} steps. Measuring takes up to {measured}, "
            "and trying the plan two more"
        )

    def require_plan(self) -> None:
        """Raise OptionError if a training ends without a plan and a plan alone was asked for."""
        if self.options.recompute_plan_only and self._store.plan is None:
            raise OptionError(
                f"--recompute-plan-only was given, and training ended after {self.steps} steps, "
                "before there was a plan. Give it more, or fewer --recompute-measure-steps."
            )

    # --- what it answers --------------------------------------------------------------------------

    @property
    def policy(self) -> RecomputePolicy:
        """The policy in force; after `close`, the last one."""
        return self.applied.policy

    @property
    def is_planned(self) -> bool:
        """Whether measuring has ended in a plan, or a stored one was found."""
        return self._store.plan is not None

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while measuring."""
        return self._in_force.plan

    def report(self) -> str:
        """The plan as a table, with what its steps needed; while measuring, a line that says so."""
        if self.plan is None:
            return f"recompute auto: measuring, {self.steps} steps done"
        own = f"rank's last peak {gib(self.peak_bytes)} GiB on stage {self.shard.stage}"
        return f"{self._table(self.plan, None)}; this {own}"

    def _table(self, plan: Plan, peaks: Sequence[int] | None) -> str:
        """A row per stage with its measured peak, if it is known, a legend, notes, and the step's
        time beside others'. The predicted peak contains the bytes that were added after the job ran
        short of memory."""
        lean_ms = self.decisions.problem(plan.profile).cost(self.decisions.leanest).step_ms
        manual = "none of Megatron's own settings fits"
        if plan.best_manual is not None:
            manual = f"best manual {plan.best_manual.name} {plan.best_manual.step_ms:,.0f} ms"
        notes = *plan.notes, *imbalance_lines(plan.profile, plan.imbalance_percentile)
        text = io.StringIO()
        console = Console(file=text, width=WIDTH, highlight=False)
        console.print("recompute auto: the plan", stages_view(plan, peaks), sep="\n")
        console.print(*map(Text, notes), *measured_step_view(plan), sep="\n")
        steps = f"predicted step {plan.cost.step_ms:,.0f} ms; full recompute {lean_ms:,.0f} ms"
        return f"{text.getvalue().rstrip()}\nrecompute auto: {steps}; {manual}"

    @property
    def routed(self) -> tuple[Mapping[int, int], ...]:
        """Rows that this rank's experts got in each microbatch of the last training call, by layer.
        A token counts once for each of its experts here. Layers without experts have none."""
        return tuple(self._seen.routed)

    @property
    def steps(self) -> int:
        """How many training steps are done."""
        return self._in_force.num_steps

    @property
    def peak_bytes(self) -> int:
        """The most bytes this rank allocated in the last step that was read."""
        return self.memory.peak_bytes

    # --- the course of a job ----------------------------------------------------------------------

    def _steps(self) -> Steps:
        """All phases of the job, one context for each step; it begins inside the first step."""
        self.memory.read_others()
        plan = self.decisions.known_plan(self._store)
        if plan is None:
            ended_before = self._store.ended_measuring()
            profile = yield from self._measuring.run(self.fingerprint, ended_before)
            plan = yield from climb(profile, self.decisions, self._in_force)
            self._store.save(plan)
        elif not self.options.recompute_plan_only:
            self._in_force.run(plan, f"the plan in {self._store.path}")
            yield from self._in_force.warm_up(plan)
            plan = yield from self._in_force.one_step(plan, reads_bytes=True)
        self._tell(plan)
        if self.options.recompute_plan_only:
            raise SystemExit(0)
        yield from self._in_force.steps(plan)

    def _tell(self, plan: Plan) -> None:
        """Print the plan, and write its figures to TensorBoard and Weights & Biases."""
        job, figures = self.job, dict[str, float]()
        peaks = self.decisions.peaks() if self.steps else None
        job.say(self._table(plan, peaks))
        for stage, cost in enumerate(plan.cost.stages):
            if peaks is not None:
                figures[f"recompute/measured_peak_gib/stage{stage}"] = peaks[stage] / GIB
            figures[f"recompute/predicted_peak_gib/stage{stage}"] = cost.peak.bytes / GIB
            figures[f"recompute/recompute_ms/stage{stage}"] = cost.recompute_ms
        iteration = self.steps if job.iteration is None else job.iteration()
        for writer in job.writers():
            if not hasattr(writer, "add_scalar"):  # Weights & Biases
                writer.log(figures, iteration)
                continue
            for name, value in figures.items():
                writer.add_scalar(name, value, iteration)
