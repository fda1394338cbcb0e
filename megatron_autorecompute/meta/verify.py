"""Compares a plan's predicted peaks with Megatron's own schedule, stage by stage, without a device.

The model is rebuilt on meta tensors from the facts in the profile (`compat.model_facts`), so the
check runs on any machine. A measured model can be rebuilt with Megatron's local layers only; one
with Transformer Engine's layers is refused, because other layers would run here. A profile made
without a device contains its job, which is run with the same stand-ins: this checks that layers,
stages and schedule add up to what Megatron does, and not the stand-ins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_autorecompute.compat import model_facts, stage_layout
from megatron_autorecompute.errors import OptionError, ProfileError, VerificationError
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.job import Job, job_from
from megatron_autorecompute.meta.meta_step import (
    Build,
    StageStep,
    build_gpt,
    build_local,
    in_processes,
    stage_step,
    workers,
)
from megatron_autorecompute.meta.model import refusals, run_stage
from megatron_autorecompute.planner.cost.hybrid_pattern import FAMILIES, pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import layout_text
from megatron_autorecompute.planner.cost.peak_memory import Peak
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import HostLink
from megatron_autorecompute.units import GIB, gib

TOLERANCE = 0.005
"""The relative difference from Megatron's that a predicted activation peak may have."""
BESIDE = 3
"""Boundary tensors; see `StageCheck.combined`."""
# The schedule contains neither the optimizer step nor what a job's own forward_step keeps.
WITHOUT_OPTIMIZER: dict[str, Any] = {"optimizer_step_peak_bytes": 0}
AT_ONCE = HostLink(1e9, 1e9, 0)
"""Copies on meta tensors take no time; `StageCheck.static_bytes` has what copies under way add."""
COMPARABLE: dict[str, Any] = {**WITHOUT_OPTIMIZER, "overhead": None, "residual_bytes": 0}


@dataclass(frozen=True, slots=True)
class StageCheck:
    """One stage: its activation peak, predicted and in Megatron's schedule, and its total."""

    stage: int
    predicted_bytes: int
    """Activation peak by the cost model, without what a meta step lacks: static bytes, the
    optimizer step, and what a job's own forward_step keeps."""
    megatron_bytes: int
    """The activation peak in Megatron's own schedule."""
    megatron_moment: str
    """The moment of that peak in Megatron's schedule: `backward of layer 11`."""
    static_bytes: int
    """Static bytes from the profile, plus what the measured job itself kept, plus what copies under
    way to host memory add to the peak."""
    budget_bytes: int
    boundary_bytes: int = 0
    """One boundary tensor, where a prediction may be too high by this: with EP overlap, and by a
    profile without `kept_gradient_bytes`, which counts the gradient of a chunk's output twice if
    the chunk's last layer is no checkpoint. 0 elsewhere."""
    combined: bool = False
    """Whether forwards run beside backwards (EP overlap). Then a prediction may be too high by
    BESIDE boundary tensors: what a dispatcher keeps of its last microbatch and no layer saves
    counts for every microbatch in flight, and in static bytes."""
    iteration: int | None = None
    """The job's own iteration whose policy and microbatches ran; None: the plan's."""
    job_bytes: int | None = None
    """The job's own peak in that iteration, or under the plan, on the stage's rank with the most;
    None: no job ran it."""
    call: int | None = None
    """The number of the call with mixed lengths that ran; None: microbatches of one length."""
    lengths: tuple[int, ...] = ()
    """The tokens of each microbatch of that call that the stage ran, on a rank."""
    bound_bytes: int | None = None
    """The plan's own peak in Megatron's schedule, where no microbatch of the call is longer than
    the plan's; None otherwise."""

    @property
    def total_bytes(self) -> int:
        """Static bytes and the peak in Megatron's own schedule."""
        return self.static_bytes + self.megatron_bytes

    @property
    def job_error(self) -> float | None:
        """`total_bytes` divided by the job's own peak, minus one; None: no job ran this."""
        return self.total_bytes / self.job_bytes - 1 if self.job_bytes else None

    @property
    def error(self) -> float:
        """Predicted peak divided by Megatron's, minus one."""
        return self.predicted_bytes / self.megatron_bytes - 1 if self.megatron_bytes else 0.0

    @property
    def fits(self) -> bool:
        """Whether static bytes and the meta step's peak are within the budget."""
        return self.total_bytes <= self.budget_bytes

    @property
    def bounded(self) -> bool:
        """Whether the plan's own peak is not below that of the call with mixed lengths."""
        return self.bound_bytes is None or self.megatron_bytes <= self.bound_bytes

    @property
    def agrees(self) -> bool:
        """Whether the prediction is within TOLERANCE of Megatron's peak, or at most one boundary
        tensor too high; with EP overlap, BESIDE of them.

        That of a call with mixed lengths comes from lines that lie on or above what was measured,
        so it may be too high by more; the plan's own peak must bound the call's."""
        too_high = self.predicted_bytes - self.megatron_bytes
        if self.call is not None:
            return self.error >= -TOLERANCE and self.bounded
        allowed = self.boundary_bytes * (BESIDE if self.combined else 1)
        return abs(self.error) <= TOLERANCE or 0 < too_high <= allowed


def verify(
    plan: Plan, done: Callable[[StageCheck], None] = lambda _: None
) -> tuple[StageCheck, ...]:
    """Run every stage of a plan on meta tensors, in processes of their own.

    Args:
        plan: the plan to check.
        done: called with each stage's check, first stage first.

    Raises: ProfileError if the profile does not say how to build the model, MachineError if the
    model's code needs a device.
    """
    if plan.profile.graphs_of_layers:
        raise OptionError(
            "verify runs layers as they are, and the profile counts them as CUDA graphs. Make the "
            "profile without cuda_graph_impl to verify the rest."
        )
    # Its bytes are on top of every peak if forwards and backwards are one CUDA graph.
    changed = {} if plan.profile.graph_of_iteration else WITHOUT_OPTIMIZER
    peaks = _peaks(plan, plan.schedule, **changed)
    comparable = _peaks(plan, plan.schedule, AT_ONCE, **COMPARABLE)
    static = [
        peak.breakdown.static_bytes - kept
        for peak, kept in zip(comparable, kept_bytes(plan), strict=True)
    ]
    combined = plan.schedule.overlap_moe_expert_parallel_comm
    exact = not combined and _knows_kept_gradients(plan)
    checks: list[StageCheck] = []

    def check(run: StageStep) -> None:
        stage = len(checks)
        static_bytes, without = static[stage], comparable[stage]
        checks.append(
            StageCheck(
                stage,
                without.bytes - static_bytes,
                run.peak_bytes,
                str(run.peak_span.where),
                static_bytes + peaks[stage].bytes - without.bytes,
                plan.budget_bytes[stage],
                0 if exact else plan.profile.boundary_bytes,
                combined,
                job_bytes=plan.measured_peak_bytes[stage] if plan.measured_peak_bytes else None,
            )
        )
        done(checks[-1])

    run_stages_of(plan, _shortest(plan, comparable), check)
    return tuple(checks)


def verify_measured(
    plan: Plan, measured: Plan, done: Callable[[StageCheck], None] = lambda _: None
) -> tuple[StageCheck, ...]:
    """Run the step that a job measured (`measured_step`), by the plan's profile, in Megatron's
    schedule; the job's own peak stands beside.

    Args:
        plan: its profile predicts, and says how to build the model.
        measured: the plan file that the job wrote; may be the plan itself.
        done: called with each stage's check, first stage first.

    Raises: OptionError as `measured_peaks` does, and what `verify` raises.
    """
    peaks = measured_peaks(plan, measured)
    step = measured.profile.measured_step
    assert step is not None  # measured_peaks has raised otherwise
    policy = RecomputePolicy.parse(step.recompute_policy, num_layers=plan.profile.num_layers)
    ran = replace(
        plan,
        recompute_policy=tuple(policy.to_config()),
        schedule=replace(plan.schedule, num_microbatches=step.num_microbatches),
        measured_peak_bytes=(),
    )
    checks: list[StageCheck] = []

    def beside(check: StageCheck) -> None:
        checks.append(
            replace(check, iteration=step.iteration, job_bytes=peaks[check.stage]),
        )
        done(checks[-1])

    verify(ran, beside)
    return tuple(checks)


def measured_peaks(plan: Plan, measured: Plan) -> tuple[int, ...]:
    """The job's own peak on every stage in the step it measured, in bytes.

    Raises: OptionError if the job recorded none, or ran other layers, shapes or stages.
    """
    step = measured.profile.measured_step
    found: list[int | None] = [None] * measured.layout.num_stages
    for rank in step.ranks if step else ():
        most, here = found[rank.stage], rank.max_memory_allocated_bytes
        found[rank.stage] = here if most is None or here is None else max(most, here)
    peaks = tuple(peak for peak in found if peak is not None)
    if len(peaks) < len(found):
        raise OptionError(
            "--measured: the file holds no peak of a job's own step for every stage "
            "(`measured_step` with max_memory_allocated_bytes, which `auto` writes on CUDA)."
        )
    for name, ours, theirs in (
        ("layers", plan.profile.num_layers, measured.profile.num_layers),
        ("stages and chunks", plan.layout.stages, measured.layout.stages),
        ("micro-batch and shards", plan.profile.parallelism, measured.profile.parallelism),
    ):
        if ours != theirs:
            raise OptionError(
                f"--measured: that job ran other {name}: {theirs}, the plan {ours}. Plan for the "
                "shapes and the pipeline of the job, or leave --measured out."
            )
    return peaks


def kept_bytes(plan: Plan) -> list[int]:
    """Static bytes of every stage that count as activations in a meta step: what layers keep of the
    last microbatch. Only profiles made without a device have this figure."""
    if "job" not in plan.profile.model.facts:
        return [0] * plan.layout.num_stages
    kinds = [
        [plan.profile.kind_of(layer) for chunk in chunks for layer in chunk.layers]
        for chunks in plan.layout.stages
    ]
    return [sum(kind.static.buffer_bytes for kind in stage if kind.static) for stage in kinds]


def _knows_kept_gradients(plan: Plan) -> bool:
    records = (record for kind in plan.profile.kinds for record in kind.choices)
    return all(record.kept_gradient_bytes is not None for record in records)


def _peaks(
    plan: Plan, schedule: Schedule, link: HostLink | None = None, **changed: Any
) -> list[Peak]:
    """Every stage's predicted peak with some fields of the stages' records changed, and another
    link to host memory."""
    stages = tuple(replace(stage, **changed) for stage in plan.profile.stages)
    profile = replace(plan.profile, stages=stages, host_link=link or plan.profile.host_link)
    cost = evaluate(profile, plan.layout, schedule, plan.policy)
    return [stage.peak for stage in cost.stages]


def _shortest(plan: Plan, peaks: list[Peak]) -> list[int]:
    """The least number of microbatches on every stage with its predicted peak of the whole step.
    After its warm-up a stage repeats itself: 256 microbatches show nothing new after 24."""
    schedule = plan.schedule
    found = [schedule.num_microbatches] * schedule.num_stages
    interleaved = schedule.num_chunks > 1
    number = 2 * schedule.group_size if interleaved else schedule.warmup_of_last_stage + 2
    open_stages = set(range(schedule.num_stages))
    while number < schedule.num_microbatches and open_stages:
        shorter = _peaks(plan, replace(schedule, num_microbatches=number), AT_ONCE, **COMPARABLE)
        for stage in tuple(open_stages):
            settled = interleaved or number >= schedule.warmup(stage) + 2
            if settled and shorter[stage].bytes == peaks[stage].bytes:
                found[stage] = number
                open_stages.discard(stage)
        number += schedule.group_size if interleaved else 1
    return found


def run_stages_of(
    plan: Plan,
    num_microbatches: Sequence[int],
    done: Callable[[StageStep], None],
    lengths: Sequence[Sequence[int]] | None = None,
) -> None:
    """Run every stage of a plan in Megatron's own schedule, in one step or several.

    Args:
        plan: its model is built again.
        num_microbatches: in the step of each stage; then in the next step of each.
        done: called with each stage's run, first stage first, step by step.
        lengths: of the microbatches of each of these, in tokens on a rank; None: the plan's.

    Raises: as `verify`.
    """
    facts = plan.profile.model.facts
    if facts.get("measured"):
        raise ProfileError(
            "Some of the profile's records come from a device, by --measured or by profile "
            "--device, but stand-ins run here, whose bytes may differ. Verify the plan of a "
            "profile made by estimate, or on the device with --recompute-policy @PLAN."
        )
    run: Callable[[int], StageStep]
    own = _on_all_ranks(plan, lengths) or [()] * len(num_microbatches)
    if "job" in facts:  # made without a device
        job = job_from(facts["job"], "The profile's model.facts.job")
        piped = replace(job, config={**job.config, **_pipeline_fields(plan)})
        run = functools.partial(_run_job, piped, tuple(num_microbatches), own, plan.policy)
    else:
        config, build = rebuilt(plan)
        shape = _shape(plan)
        shapes = [
            replace(shape, num_microbatches=number, lengths=each)
            for number, each in zip(num_microbatches, own, strict=True)
        ]
        name = plan.profile.model.name
        run = functools.partial(_run_rebuilt, name, config, shapes, plan.policy, build)
    numbers = range(len(num_microbatches))
    in_processes(run, numbers, workers(len(numbers)), done)


def _run_job(
    job: Job,
    num_microbatches: Sequence[int],
    lengths: Sequence[tuple[int, ...]],
    policy: RecomputePolicy,
    number: int,
) -> StageStep:
    stage = number % job.size("pipeline")
    return run_stage(job, num_microbatches[number], policy, stage, lengths[number])


def _run_rebuilt(
    name: str,
    config: Any,
    shapes: Sequence[StepShape],
    policy: RecomputePolicy,
    build: Build,
    number: int,
) -> StageStep:
    with refusals(name):
        stage = number % config.pipeline_model_parallel_size
        return stage_step(config, stage, shapes[number], policy, build)


def _on_all_ranks(
    plan: Plan, lengths: Sequence[Sequence[int]] | None
) -> list[tuple[int, ...]] | None:
    """Lengths before context parallelism splits them."""
    ranks = plan.profile.parallelism.context_parallel
    if lengths is None:
        return None
    return [tuple(ranks * one for one in call) for call in lengths]


def require_verified(checks: Sequence[StageCheck]) -> None:
    """Raise VerificationError for the worst stage that exceeds its budget or differs too much."""
    over = [check for check in checks if check.iteration is None and not check.fits]
    apart = [check for check in checks if not check.agrees]
    if over:
        worst = max(over, key=lambda c: c.total_bytes - c.budget_bytes)
        raise VerificationError(
            f"Stage {worst.stage} needs {gib(worst.total_bytes)} GiB "
            f"in Megatron's own schedule at its fullest moment, {worst.megatron_moment}; its "
            f"budget is {gib(worst.budget_bytes)} GiB. Plan again with a smaller budget, or "
            "measure the profile again."
        )
    if unbound := [check for check in checks if not check.bounded]:
        worst = unbound[0]
        assert worst.bound_bytes is not None
        raise VerificationError(
            f"Stage {worst.stage}: call {worst.call} has {worst.megatron_bytes / GIB:.3f} GiB of "
            f"activations, {worst.megatron_moment}; the plan's own step, with no microbatch that "
            f"is shorter, has {worst.bound_bytes / GIB:.3f} GiB. Report this model."
        )
    if apart:
        worst = max(apart, key=lambda c: abs(c.error))
        raise VerificationError(
            f"Stage {worst.stage}: {worst.predicted_bytes / GIB:.3f} GiB of activations were "
            f"predicted, Megatron's own schedule has {worst.megatron_bytes / GIB:.3f} GiB at its "
            f"fullest moment, {worst.megatron_moment} ({worst.error:+.1%}; at most "
            f"{TOLERANCE:.1%} is allowed). The profile is not of "
            "this model or these shapes, or a layer's record is wrong: measure it again."
        )


def verdict(checks: Sequence[StageCheck]) -> str:
    """One sentence on checks that `require_verified` lets pass; two where a job measured some."""
    calls = [check for check in checks if check.call is not None]
    worst = max((c for c in checks if c.call is None), key=lambda check: abs(check.error))
    own = [check for check in checks if check.iteration is None and check.call is None]
    stages = "the stage fits" if len(own) == 1 else f"all {len(own)} stages fit"
    said = (
        f"Verified: {stages}; Megatron's own peaks are within {abs(worst.error):.2%} of those "
        "predicted."
    )
    if calls:
        errors = [check.error for check in calls]
        bound = "the plan's peak" if all(check.bound_bytes for check in calls) else "its budget"
        said += (
            f" No call of mixed lengths exceeds {bound} on a stage; of their peaks, predictions "
            f"are off by {min(errors):+.2%} to {max(errors):+.2%}."
        )
    off = [check.job_error for check in checks if check.job_error is not None]
    if not off:
        return said
    furthest = max(off, key=abs)
    return f"{said} The job's own peaks differ from these totals by at most {abs(furthest):.2%}."


def rebuilt(plan: Plan) -> tuple[Any, Callable[..., Any]]:
    """The config of the plan's model and the function that builds one chunk of it."""
    facts = plan.profile.model.facts
    lacking = [name for name in model_facts.NAMES if name not in facts]
    if lacking:
        raise ProfileError(
            f"To verify a plan its model is built again, but the profile's model.facts lack "
            f"{', '.join(lacking)}. Profiles that `auto` or `compare` measured of a GPTModel or a "
            "HybridModel have them: measure again, or write them into the profile "
            "(docs/files.md)."
        )
    if facts["transformer_impl"] != "local":
        raise ProfileError(
            f"The profile was made with transformer_impl {facts['transformer_impl']!r}; without a "
            "device only Megatron's local layers run, whose bytes differ. Verify on the "
            "device with --recompute-policy @PLAN, or profile with --transformer-impl local."
        )
    fields = _pipeline_fields(plan)
    pattern = fields.pop("hybrid_layer_pattern", None)
    source = "The profile's transformer_config"
    config = model_facts.config_of({**facts["transformer_config"], **fields}, source)
    stage_layout.note_pattern(config, pattern)
    ends = {name: facts[name] for name in model_facts.NAMES[-2:]}
    if pattern is None:
        return config, functools.partial(build_gpt, **ends)
    _refuse_kernels(pattern)
    return config, functools.partial(build_local, pattern=pattern, **ends)


def _refuse_kernels(pattern: str) -> None:
    """Raise ProfileError for layers whose kernels, of packages of their own, do not run here."""
    for symbol in sorted(set(pattern) & set("MGD+")):
        raise ProfileError(
            f"The profile was measured of {symbol!r} layers ({FAMILIES[symbol]}) in hybrid_layer_"
            f"pattern {pattern!r:.200}, whose kernels need a device. Verify on the device with "
            "--recompute-policy @PLAN, or the plan of a profile made by estimate."
        )


def _pipeline_fields(plan: Plan) -> dict[str, Any]:
    """The plan's pipeline (perhaps not the measured one) as fields of Megatron's config."""
    layout, schedule = plan.layout, plan.schedule
    several = layout.num_chunks > 1
    fields: dict[str, Any] = {
        "pipeline_model_parallel_size": layout.num_stages,
        "virtual_pipeline_model_parallel_size": layout.num_chunks if several else None,
        "pipeline_model_parallel_layout": None if _is_even(layout) else layout_text(layout),
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "overlap_p2p_comm": several and plan.profile.overlap_p2p_comm,
        "deallocate_pipeline_outputs": plan.profile.deallocate_pipeline_outputs,
        "overlap_moe_expert_parallel_comm": schedule.overlap_moe_expert_parallel_comm,
    }
    pattern = pattern_of_job(plan.profile.model.facts)
    if pattern is not None:
        placed = str(pattern.placed(layout.chunk_layers()))
        fields |= {"pipeline_model_parallel_layout": None, "hybrid_layer_pattern": placed}
    if several:
        fields["microbatch_group_size_per_vp_stage"] = schedule.group_size
    return fields


def _is_even(layout: Layout) -> bool:
    sizes = {len(layers) for layers in layout.chunk_layers()}
    return len(sizes) == 1 and not layout.mtp_num_layers


def _shape(plan: Plan) -> StepShape:
    parallel, facts = plan.profile.parallelism, plan.profile.model.facts
    experts = parallel.expert_parallel * parallel.expert_tensor_parallel
    ranks = parallel.tensor_parallel * parallel.context_parallel
    return StepShape(
        seq_length=parallel.seq_length,
        micro_batch_size=parallel.micro_batch_size,
        num_microbatches=plan.schedule.num_microbatches,
        vocab_size=facts["vocab_size"],
        data_parallel_size=math.lcm(experts, ranks) // ranks,
    )
