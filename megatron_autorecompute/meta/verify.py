"""Compares a plan's predicted peaks with Megatron's own schedule, stage by stage, without a device.

The job of the profile runs on meta tensors: this checks that layers, stages and schedule add up to
what Megatron does, and not the stand-ins for fused kernels, which run on both sides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

from megatron_autorecompute.compat import model_facts
from megatron_autorecompute.errors import OptionError, ProfileError, VerificationError
from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.meta.job import Job, job_from
from megatron_autorecompute.meta.meta_step import StageStep, in_processes, workers
from megatron_autorecompute.meta.model import EVEN_SPLIT, run_stage
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
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
    """One stage in one step: its activation peak, predicted and in Megatron's schedule, its total.

    The steps are the plan's own (`plan`), calls whose microbatches differ in length (`call 1`), and
    one that a job measured under a policy of its own (`iteration 3`).
    """

    stage: int
    predicted_bytes: int
    """Activation peak by the cost model, without what a meta step lacks: static bytes, the
    optimizer step, and what a job's own forward_step keeps."""
    megatron_bytes: int
    """The activation peak in Megatron's own schedule."""
    static_bytes: int
    """Static bytes from the profile, plus what the measured job itself kept, plus what copies under
    way to host memory add to the peak."""
    budget_bytes: int | None
    """None: the step had another policy than the plan."""
    allowed_bytes: int = 0
    """By how much a prediction may be too high: by one boundary tensor with a profile without
    `kept_gradient_bytes`, which counts the gradient of a chunk's output twice behind a layer that
    is no checkpoint; with EP overlap by BESIDE of them, for what dispatchers keep counts twice."""
    step: str = "plan"
    job_bytes: int | None = None
    """The job's own peak in that step, on the stage's rank with the most; None: no job ran it."""
    lengths: Lengths = ()
    """The tokens of each microbatch of a call."""
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
        return self.budget_bytes is None or self.total_bytes <= self.budget_bytes

    @property
    def bounded(self) -> bool:
        """Whether the plan's own peak is not below that of the call with mixed lengths."""
        return self.bound_bytes is None or self.megatron_bytes <= self.bound_bytes

    @property
    def agrees(self) -> bool:
        """Whether the prediction is within TOLERANCE of Megatron's peak, or too high by at most
        `allowed_bytes`; of a call, whose lines lie above what was measured, by any bytes, if the
        plan's own peak bounds it."""
        too_high = self.predicted_bytes - self.megatron_bytes
        if self.lengths:
            return self.error >= -TOLERANCE and self.bounded
        return abs(self.error) <= TOLERANCE or 0 < too_high <= self.allowed_bytes


class _Run(NamedTuple):
    """What every stage runs in one step."""

    policy: RecomputePolicy
    num_microbatches: int
    lengths: Lengths = ()
    """Of the microbatches, on all context parallel ranks; empty: the plan's."""


def verify(
    plan: Plan,
    calls: Sequence[Lengths] = (),
    measured: Plan | None = None,
    done: Callable[[StageCheck], None] = lambda _: None,
) -> tuple[StageCheck, ...]:
    """Run every stage of a plan on meta tensors, in processes of their own.

    The plan is for the longest microbatch, and so bounds every call of shorter ones
    (docs/decisions/bytes.md). Calls test that bound.

    Args:
        plan: the plan to check.
        calls: tokens of each microbatch on a rank, each padded here to what Megatron can divide.
        measured: the plan file of a job whose measured step (`measured_step`) is run too, by the
            plan's profile; may be the plan itself.
        done: called with each stage's check, step after step, first stage first.

    Raises:
        ProfileError: the profile does not say how to build the model, or holds for one length.
        OptionError: what the job measured is of other layers, shapes or stages, or has no peaks;
            CUDA graphs of layers; calls with EP overlap.
        MachineError: the model's code needs a device.
    """
    if plan.profile.graphs_of_layers:
        raise OptionError(
            "verify runs layers as they are, and the profile counts them as CUDA graphs. Make the "
            "profile without cuda_graph_impl to verify the rest."
        )
    if calls and plan.schedule.overlap_moe_expert_parallel_comm:
        raise OptionError(
            "--lengths under overlap_moe_expert_parallel_comm: what a forward takes beside the "
            "backward of a shorter microbatch is not predicted. Leave the lengths out."
        )
    ranks = plan.profile.parallelism.context_parallel
    own = _expected(plan)
    steps = [(own, _Run(plan.policy, _fewest(plan)))]
    for number, lengths in enumerate((_padded(plan, each) for each in calls), 1):
        whole = tuple(ranks * one for one in lengths)
        of_call = _expected_in_call(plan, own, number, lengths)
        steps.append((of_call, _Run(plan.policy, len(lengths), whole)))
    if measured is not None:
        steps.append(_expected_in_job(plan, measured))
    expected = [check for of_stages, _ in steps for check in of_stages]
    checks: list[StageCheck] = []

    def check(run: StageStep) -> None:
        one = replace(expected[len(checks)], megatron_bytes=run.peak_bytes)
        if one.lengths and max(one.lengths) <= _cap(plan):
            one = replace(one, bound_bytes=checks[one.stage].megatron_bytes)
        checks.append(one)
        done(one)

    run = functools.partial(_run, job_of(plan), [each for _, each in steps])
    in_processes(run, range(len(expected)), workers(len(expected)), check)
    return tuple(checks)


def _run(job: Job, steps: Sequence[_Run], number: int) -> StageStep:
    at, stage = divmod(number, job.size("pipeline"))
    policy, num_microbatches, lengths = steps[at]
    return run_stage(job, num_microbatches, policy, stage, lengths)


def _expected(plan: Plan) -> list[StageCheck]:
    """The checks of the plan's own step, without Megatron's peaks."""
    # The optimizer's bytes are on top of every peak if forwards and backwards are one CUDA graph.
    changed = {} if plan.profile.graph_of_iteration else WITHOUT_OPTIMIZER
    records = [record for kind in plan.profile.kinds for record in kind.choices]
    allowed = int(any(record.kept_gradient_bytes is None for record in records))
    if plan.schedule.overlap_moe_expert_parallel_comm:
        allowed = BESIDE
    found = []
    for stage, (whole, peak, kept) in enumerate(
        zip(
            _peaks(plan, plan.schedule, **changed),
            _peaks(plan, plan.schedule, AT_ONCE, **COMPARABLE),
            _kept_bytes(plan),
            strict=True,
        )
    ):
        static_bytes = peak.breakdown.static_bytes - kept
        found.append(
            StageCheck(
                stage,
                predicted_bytes=peak.bytes - static_bytes,
                megatron_bytes=0,
                static_bytes=static_bytes + whole.bytes - peak.bytes,
                budget_bytes=plan.budget_bytes[stage],
                allowed_bytes=allowed * plan.profile.boundary_bytes,
                job_bytes=plan.measured_peak_bytes[stage] if plan.measured_peak_bytes else None,
            )
        )
    return found


def _expected_in_call(
    plan: Plan, own: Sequence[StageCheck], number: int, lengths: Lengths
) -> list[StageCheck]:
    """The checks of a call; `own`: those of the plan's own step."""
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
    found = []
    for check, kept in zip(own, _kept_bytes(plan), strict=True):
        static_bytes = stage_base(profile, plan.layout, check.stage).static.total_bytes - kept
        found.append(
            replace(
                check,
                predicted_bytes=call.stage_peak(check.stage) - static_bytes,
                step=f"call {number}",
                job_bytes=None,
                lengths=lengths,
            )
        )
    return found


def _expected_in_job(plan: Plan, measured: Plan) -> tuple[list[StageCheck], _Run]:
    """The checks of the step that a job measured, and what it ran."""
    step = measured.profile.measured_step
    peaks: list[list[int | None]] = [[] for _ in measured.layout.stages]
    for rank in step.ranks if step else ():
        peaks[rank.stage].append(rank.max_memory_allocated_bytes)
    highest = [max(filter(None, of_ranks), default=0) for of_ranks in peaks]
    if step is None or not all(highest):
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
    policy = RecomputePolicy.parse(step.recompute_policy, num_layers=plan.profile.num_layers)
    ran = replace(
        plan,
        recompute_policy=tuple(policy.to_config()),
        schedule=replace(plan.schedule, num_microbatches=step.num_microbatches),
    )
    name = f"iteration {step.iteration}"
    checks = [
        replace(one, step=name, job_bytes=highest[one.stage], budget_bytes=None)
        for one in _expected(ran)
    ]
    return checks, _Run(policy, _fewest(ran))


def _kept_bytes(plan: Plan) -> list[int]:
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


def _fewest(plan: Plan) -> int:
    """The least number of microbatches with the predicted peaks of the whole step. After its
    warm-up a stage repeats itself: 256 microbatches show nothing new after 24."""
    schedule = plan.schedule

    def peaks(number: int) -> list[int]:
        shorter = replace(schedule, num_microbatches=number)
        return [peak.bytes for peak in _peaks(plan, shorter, AT_ONCE, **COMPARABLE)]

    interleaved, whole = schedule.num_chunks > 1, peaks(schedule.num_microbatches)
    number = 2 * schedule.group_size if interleaved else schedule.num_stages + 1
    while number < schedule.num_microbatches and peaks(number) != whole:
        number += schedule.group_size if interleaved else 1
    return min(number, schedule.num_microbatches)


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


def _cap(plan: Plan) -> int:
    """The tokens of a microbatch on a rank that the plan is for."""
    sizes = plan.profile.parallelism
    return sizes.seq_length * sizes.micro_batch_size // sizes.context_parallel


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


def require_verified(checks: Sequence[StageCheck]) -> None:
    """Raise VerificationError for the worst stage that exceeds its budget or differs too much."""
    over = [(check.total_bytes - (check.budget_bytes or 0), check) for check in checks]
    over = [(bytes_over, check) for bytes_over, check in over if not check.fits]
    if over:
        bytes_over, worst = max(over, key=lambda one: one[0])
        raise VerificationError(
            f"Stage {worst.stage} needs {gib(worst.total_bytes)} GiB in Megatron's own schedule; "
            f"its budget is {gib(worst.total_bytes - bytes_over)} GiB. Plan again with a smaller "
            "budget, or measure the profile again."
        )
    apart = [check for check in checks if not check.agrees]
    if apart:
        worst = max(apart, key=lambda check: (not check.bounded, abs(check.error)))
        raise VerificationError(
            f"Stage {worst.stage}, {worst.step}: {worst.predicted_bytes / GIB:.3f} GiB of "
            f"activations were predicted, Megatron's own schedule has "
            f"{worst.megatron_bytes / GIB:.3f} GiB ({worst.error:+.1%}; at most {TOLERANCE:.1%} is "
            "allowed, and no call may exceed the plan's own peak). The profile is not of this "
            "model or these shapes, or a layer's record is wrong: measure it again."
        )


def verdict(checks: Sequence[StageCheck]) -> str:
    """A few sentences on checks that `require_verified` lets pass."""
    own = [check for check in checks if check.step == "plan"]
    calls = [check for check in checks if check.lengths]
    stages = "the stage fits" if len(own) == 1 else f"all {len(own)} stages fit"
    worst = max(abs(check.error) for check in checks if not check.lengths)
    said = f"Verified: {stages}; Megatron's own peaks are within {worst:.2%} of those predicted."
    if calls:
        bound = "the plan's peak" if all(check.bound_bytes for check in calls) else "its budget"
        said += f" No call of mixed lengths exceeds {bound} on a stage."
    off = [abs(check.job_error) for check in checks if check.job_error is not None]
    if off:
        said += f" The job's own peaks differ from these totals by at most {max(off):.2%}."
    return said


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
    even = len({*map(len, layout.chunk_layers())}) == 1 and not layout.mtp_num_layers
    fields: dict[str, Any] = {
        **EVEN_SPLIT,
        "pipeline_model_parallel_size": layout.num_stages,
        "virtual_pipeline_model_parallel_size": layout.num_chunks if several else None,
        "pipeline_model_parallel_layout": None if even else layout_text(layout),
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
