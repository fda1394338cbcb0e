"""Compares a plan's predicted peaks with Megatron's own schedule, stage by stage, without a device.

The job is run on meta tensors, so the check runs on any machine. A profile made without a device
contains its job, which is run with the same stand-ins: this checks that layers, stages and schedule
add up to what Megatron does, and not the stand-ins. Of a measured profile the facts
(`compat.model_facts`) describe a job of Megatron's local layers; Transformer Engine's are refused,
because other layers would run here.

In calls whose microbatches differ in length stages exchange shapes (`variable_seq_lengths`), and
samples are packed (THD) where the model's attention takes packed samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from megatron_autorecompute.compat import model_facts
from megatron_autorecompute.errors import OptionError, ProfileError, VerificationError
from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.meta.job import Job, job_from
from megatron_autorecompute.meta.meta_step import StageStep, in_processes, workers
from megatron_autorecompute.meta.model import EVEN_SPLIT, run_stage
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import layout_text
from megatron_autorecompute.planner.cost.lengths import Arrangement
from megatron_autorecompute.planner.cost.peak_memory import Peak, stage_base
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.planner.search.buckets import EXAMPLES
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import HostLink
from megatron_autorecompute.units import GIB, gib

TOLERANCE = 0.005
"""The relative difference from Megatron's that a predicted activation peak may have."""
BESIDE = 3
"""Boundary tensors; see `StageCheck.allowed_bytes`."""
# The schedule contains neither the optimizer step nor what a job's own forward_step keeps.
WITHOUT_OPTIMIZER: dict[str, Any] = {"optimizer_step_peak_bytes": 0}
AT_ONCE = HostLink(1e9, 1e9, 0)
"""Copies on meta tensors take no time; `StageCheck.static_bytes` has what copies under way add."""
COMPARABLE: dict[str, Any] = {**WITHOUT_OPTIMIZER, "overhead": None, "residual_bytes": 0}
Lengths = tuple[int, ...]
"""Tokens of each microbatch of a call, on one rank, in order."""


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
    allowed_bytes: int = 0
    """By how much a prediction may be too high: by one boundary tensor with a profile without
    `kept_gradient_bytes`, which counts the gradient of a chunk's output twice if the chunk's last
    layer is no checkpoint; with EP overlap by BESIDE of them, because what a dispatcher keeps of
    its last microbatch and no layer saves counts for every microbatch in flight, and in static
    bytes."""
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
        """Whether the prediction is within TOLERANCE of Megatron's peak, or too high by at most
        `allowed_bytes`.

        That of a call with mixed lengths comes from lines that lie on or above what was measured,
        so it may be too high by more; the plan's own peak must bound the call's."""
        too_high = self.predicted_bytes - self.megatron_bytes
        if self.call is not None:
            return self.error >= -TOLERANCE and self.bounded
        return abs(self.error) <= TOLERANCE or 0 < too_high <= self.allowed_bytes


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
    records = [record for kind in plan.profile.kinds for record in kind.choices]
    allowed = int(any(record.kept_gradient_bytes is None for record in records))
    if plan.schedule.overlap_moe_expert_parallel_comm:
        allowed = BESIDE
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
                allowed * plan.profile.boundary_bytes,
                job_bytes=plan.measured_peak_bytes[stage] if plan.measured_peak_bytes else None,
            )
        )
        done(checks[-1])

    run_stages_of(plan, _fewest(plan, comparable), check)
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


def _peaks(
    plan: Plan, schedule: Schedule, link: HostLink | None = None, **changed: Any
) -> list[Peak]:
    """Every stage's predicted peak with some fields of the stages' records changed, and another
    link to host memory."""
    stages = tuple(replace(stage, **changed) for stage in plan.profile.stages)
    profile = replace(plan.profile, stages=stages, host_link=link or plan.profile.host_link)
    cost = evaluate(profile, plan.layout, schedule, plan.policy)
    return [stage.peak for stage in cost.stages]


def _fewest(plan: Plan, peaks: list[Peak]) -> int:
    """The least number of microbatches with the predicted peaks of the whole step. After its
    warm-up a stage repeats itself: 256 microbatches show nothing new after 24."""
    schedule = plan.schedule
    interleaved = schedule.num_chunks > 1
    number = 2 * schedule.group_size if interleaved else schedule.num_stages + 1
    while number < schedule.num_microbatches:
        shorter = _peaks(plan, replace(schedule, num_microbatches=number), AT_ONCE, **COMPARABLE)
        if [peak.bytes for peak in shorter] == [peak.bytes for peak in peaks]:
            return number
        number += schedule.group_size if interleaved else 1
    return schedule.num_microbatches


def run_stages_of(
    plan: Plan,
    num_microbatches: int,
    done: Callable[[StageStep], None],
    calls: Sequence[Lengths] = ((),),
) -> None:
    """Run every stage of a plan in Megatron's own schedule, in one call or several.

    Args:
        plan: its model is built again.
        num_microbatches: of a call whose microbatches have the plan's length.
        done: called with each stage's run, first stage first, call by call.
        calls: tokens of each microbatch on a rank; an empty one: the plan's.

    Raises: as `verify`.
    """
    ranks = plan.profile.parallelism.context_parallel  # lengths before it splits them
    whole = [tuple(ranks * one for one in lengths) for lengths in calls]
    run = functools.partial(_run, job_of(plan), num_microbatches, whole, plan.policy)
    numbers = range(len(whole) * plan.layout.num_stages)
    in_processes(run, numbers, workers(len(numbers)), done)


def _run(
    job: Job, num_microbatches: int, calls: Sequence[Lengths], policy: RecomputePolicy, number: int
) -> StageStep:
    call, stage = divmod(number, job.size("pipeline"))
    lengths = calls[call]
    return run_stage(job, len(lengths) or num_microbatches, policy, stage, lengths)


def calls_of(plan: Plan) -> tuple[Lengths, ...]:
    """Calls to try, of those that the profile keeps: the fullest with its longest microbatches
    first, and two others. A plan with EP overlap, or whose profile keeps none, has no such calls.
    """
    texts = plan.profile.model.facts.get(EXAMPLES)
    if not texts or plan.schedule.overlap_moe_expert_parallel_comm:
        return ()
    found = [tuple(map(int, text.split())) for text in texts]
    fullest = max(found, key=sum)
    others = [lengths for lengths in found if lengths is not fullest]
    return (tuple(sorted(fullest, reverse=True)), *others[:2])


def cap_of(plan: Plan) -> int:
    """The tokens of a microbatch on a rank that the plan is for."""
    sizes = plan.profile.parallelism
    return sizes.seq_length * sizes.micro_batch_size // sizes.context_parallel


def verify_calls(
    plan: Plan,
    calls: Sequence[Lengths],
    bounds: Sequence[StageCheck],
    done: Callable[[StageCheck], None] = lambda _: None,
) -> tuple[StageCheck, ...]:
    """Run every stage of a plan in calls of mixed lengths.

    The plan is for the longest microbatch, and so bounds every call of shorter ones
    (docs/decisions/bytes.md). These runs test that bound.

    Args:
        plan: the plan to check; its profile has lines.
        calls: lengths, each padded here to what Megatron can divide.
        bounds: the plan's own checks, every microbatch as long as the plan's.
        done: called with each stage's check, call after call.

    Raises: ProfileError if the profile holds for one length, and what `verify` raises.
    """
    found: list[StageCheck] = []
    padded = [_padded(plan, lengths) for lengths in calls]
    predicted = [
        _predicted_bytes(plan, lengths, stage) for lengths in padded for stage in range(len(bounds))
    ]

    def check(run: StageStep) -> None:
        call, stage = divmod(len(found), len(bounds))
        bound, lengths = bounds[stage], padded[call]
        found.append(
            replace(
                bound,
                predicted_bytes=predicted[len(found)],
                megatron_bytes=run.peak_bytes,
                megatron_moment=str(run.peak_span.where),
                job_bytes=None,
                call=call + 1,
                lengths=lengths,
                bound_bytes=bound.megatron_bytes if max(lengths) <= cap_of(plan) else None,
            )
        )
        done(found[-1])

    if calls:
        run_stages_of(plan, 0, check, padded)
    return tuple(found)


def _padded(plan: Plan, lengths: Lengths) -> Lengths:
    """Lengths as a loop pads them; interleaved, the longest are halved until the number fits."""
    sizes, stages = plan.profile.parallelism, plan.layout.num_stages
    unit = sizes.tensor_parallel if sizes.sequence_parallel else 1
    unit *= 2 if sizes.context_parallel > 1 else 1
    own = list(lengths)
    while plan.layout.num_chunks > 1 and len(own) % stages:
        longest = max(range(len(own)), key=own.__getitem__)
        half = own[longest] // 2
        own[longest : longest + 1] = [own[longest] - half, max(1, half)]
    return tuple(-(-one // unit) * unit for one in own)


def _predicted_bytes(plan: Plan, lengths: Lengths, stage: int) -> int:
    """Activation peak of a stage, as `StageCheck.predicted_bytes` is of the plan."""
    profile = replace(
        plan.profile,
        stages=tuple(replace(record, **COMPARABLE) for record in plan.profile.stages),
    )
    call = Arrangement(
        profile,
        plan.layout,
        replace(plan.schedule, num_microbatches=len(lengths)),
        plan.policy,
        tuple(Microbatch.longest(one) for one in lengths),
    )
    static = stage_base(profile, plan.layout, stage).static.total_bytes
    return call.stage_peak(stage) - static + kept_bytes(plan)[stage]


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


def job_of(plan: Plan) -> Job:
    """The job whose model and pipeline are the plan's.

    Raises: ProfileError if the profile does not say how to build the model, or if other layers
    would run here.
    """
    facts = plan.profile.model.facts
    if facts.get("measured"):
        raise ProfileError(
            "Some of the profile's records come from a device, by --measured or by profile "
            "--device, but stand-ins run here, whose bytes may differ. Verify the plan of a "
            "profile made by estimate, or on the device with --recompute-policy @PLAN."
        )
    made = facts.get("job")  # without a device
    job = _job_of_layers(plan) if made is None else job_from(made, "The profile's model.facts.job")
    return replace(job, config={**job.config, **_pipeline_fields(plan)})


def _job_of_layers(plan: Plan) -> Job:
    """The job whose layers were measured, by the facts that it wrote."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    facts = plan.profile.model.facts
    lacking = [name for name in model_facts.NAMES if name not in facts]
    if lacking:
        raise ProfileError(
            f"To verify a plan its model is built again, but the profile's model.facts lack "
            f"{', '.join(lacking)}. Profiles that `auto` or `compare` measured of a GPTModel or a "
            "HybridModel have them: measure again, or write them into the profile "
            "(docs/files.md)."
        )
    pattern = facts.get("hybrid_layer_pattern") or ""
    if facts["transformer_impl"] != "local" or set(pattern) & set("MGD+"):
        raise ProfileError(
            f"The profile was made with transformer_impl {facts['transformer_impl']!r} and "
            f"hybrid_layer_pattern {pattern!r:.200}. Without a device only Megatron's local layers "
            "run, whose bytes differ, and no M, G, D or + layers. Verify on the device with "
            "--recompute-policy @PLAN, or the plan of a profile made by estimate."
        )
    parallel = plan.profile.parallelism
    ranks = parallel.tensor_parallel * parallel.context_parallel
    replicas = math.lcm(parallel.expert_parallel * parallel.expert_tensor_parallel, ranks) // ranks
    defaults = {field.name: field.default for field in fields(TransformerConfig)}
    return Job(
        name=plan.profile.model.name,
        config={name: v for name, v in defaults.items() if v is not MISSING}
        | facts["transformer_config"],
        num_gpus=plan.layout.num_stages * ranks * replicas,
        seq_length=parallel.seq_length,
        micro_batch_size=parallel.micro_batch_size,
        global_batch_size=parallel.micro_batch_size * replicas * plan.schedule.num_microbatches,
        vocab_size=facts["vocab_size"],
        make_vocab_size_divisible_by=1,
        transformer_impl="local",
        te_version="",
        torch_compile=False,
        position_embedding_type=facts["position_embedding_type"],
        untie_embeddings_and_output_weights=not facts["share_embeddings_and_output_weights"],
    )


def _pipeline_fields(plan: Plan) -> dict[str, Any]:
    """The plan's pipeline (perhaps not the measured one) as fields of Megatron's config."""
    layout, schedule = plan.layout, plan.schedule
    several = layout.num_chunks > 1
    fields: dict[str, Any] = {
        **EVEN_SPLIT,
        "pipeline_model_parallel_size": layout.num_stages,
        "virtual_pipeline_model_parallel_size": layout.num_chunks if several else None,
        "pipeline_model_parallel_layout": None if _is_even(layout) else layout_text(layout),
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
