"""Predicts the stages that a run measured, from the run's flags."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from benchmarks.measured.encoder_decoder import encoder_decoder_need  # noqa: E402
from benchmarks.measured.kept_microbatches import with_kept_microbatches  # noqa: E402
from benchmarks.measured.rounding import Rounding, rounding  # noqa: E402
from benchmarks.measured.runs import AROUND_JOB  # noqa: E402
from benchmarks.measured.stage_need import Need, own_need  # noqa: E402
from megatron_autorecompute.errors import AutorecomputeError  # noqa: E402
from megatron_autorecompute.meta import model  # noqa: E402
from megatron_autorecompute.meta.devices import Efficiency, device  # noqa: E402
from megatron_autorecompute.meta.flags import job_from_flags  # noqa: E402
from megatron_autorecompute.meta.job import Job  # noqa: E402
from megatron_autorecompute.meta.profiling import counts_graphs, profile_job  # noqa: E402
from megatron_autorecompute.meta.without_cuda import deterministic  # noqa: E402
from megatron_autorecompute.patched import patched  # noqa: E402
from megatron_autorecompute.planner.cost.policy_cost import StageCost  # noqa: E402
from megatron_autorecompute.planner.search.problem import Problem  # noqa: E402
from megatron_autorecompute.policy import RecomputePolicy  # noqa: E402

MOST_REASON = 400


@dataclass(frozen=True, slots=True)
class Case:
    """What runs of equal flags share; results are found by it."""

    flags: tuple[str, ...]
    worlds: tuple[int, ...]
    gpu: str
    between_steps_bytes: int | None = None
    encoder_decoder: tuple[int, int, int] | None = None
    """As `Run`'s."""
    environment: tuple[tuple[str, Any], ...] = ()
    """As `Run`'s."""
    flags_without_quantising: tuple[str, ...] = ()
    """As `Run`'s."""
    measured_stages: tuple[int, ...] = (-1,)
    """Those whose peaks are asked for; what the allocator's blocks add is predicted of these."""
    scatters: bool = False
    """As `Run`'s."""
    evaluates: bool = False
    """As `Run`'s."""
    host: float = 1.0
    """How many times as long its host takes as the device's usual one."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What is predicted of one stage."""

    peak_bytes: int
    moment: str
    first_step_bytes: int | None
    """The peak of a job's first step, before Adam's moments; None if not predicted."""
    parts: dict[str, int]
    """Bytes at that moment, by the parts of `planner.Breakdown`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Every stage, or why there is none."""

    stages: tuple[Stage, ...] = ()
    num_gpus: int = 0
    step_ms: float = 0.0
    """0 where there is no prediction of it."""
    without_quantising: tuple[Stage, ...] = ()
    """Every stage with no layer quantised, where it is not known which are."""
    uncovered: str = ""


def predicted(case: Case) -> Prediction:
    """Predict a case. An error becomes its reason; it never ends the others."""
    try:
        with _quiet(), _older(case):
            return _with_bound(case, _nearest(case))
    except AutorecomputeError as error:
        reason = " ".join(str(error).split())
    except Exception as error:
        reason = f"an error of this package: {type(error).__name__}: {error}"
    return Prediction(uncovered=reason[:MOST_REASON])


def _with_bound(case: Case, found: Prediction) -> Prediction:
    if not case.flags_without_quantising:
        return found
    flags, worlds = case.flags_without_quantising, (found.num_gpus,)
    other = _nearest(replace(case, flags=flags, worlds=worlds))
    return replace(found, without_quantising=other.stages)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In this block nothing is said of a machine without CUDA, TE and Apex."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _older(case: Case) -> contextlib.AbstractContextManager[None]:
    """In this block deterministic mode keeps what it did in the run's Megatron."""
    if not case.scatters:
        return contextlib.nullcontext()
    return patched(model, "deterministic", lambda _: deterministic(False))


def _nearest(case: Case) -> Prediction:
    """With several possible worlds, that whose bytes between steps are nearest to the run's."""
    if case.encoder_decoder:
        return _of_encoder_decoder(case, case.encoder_decoder)
    if len(case.worlds) == 1:
        return _of_world(case, case.worlds[0])
    found, refused = [], None
    for world in case.worlds:
        try:
            found.append((abs(_static(case, world) - (case.between_steps_bytes or 0)), world))
        except AutorecomputeError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return _of_world(case, min(found)[1])


def _static(case: Case, world: int) -> int:
    model, _ = _problem(case, world)
    return model.profile.stages[-1].static.total_bytes


def _job(case: Case, world: int, *, graphs: bool = False) -> Job:
    known = {name: value for name, value in case.environment if name not in AROUND_JOB}
    return replace(job_of(case.flags, world, graphs=graphs), **known)


def _has(case: Case, name: str) -> bool:
    """Whether one of AROUND_JOB is in the case's environment."""
    return bool(dict(case.environment).get(name))


def _problem(case: Case, world: int) -> tuple[Problem, Job]:
    job = _job(case, world)
    return _problem_of(case, job), job


def _problem_of(case: Case, job: Job, efficiency: Efficiency | None = None) -> Problem:
    modules = job.config.get("recompute_modules") or ()
    selective = job.config.get("recompute_granularity") == "selective"
    gpu = device(case.gpu)
    efficiency = (efficiency or gpu.reaches).with_host(case.host)
    profile = profile_job(job, gpu, efficiency, only=modules if selective else ())
    if _has(case, "keeps_microbatches"):
        profile = with_kept_microbatches(profile, job)
    return Problem(profile, job.layout(), job.schedule())


def step_ms(case: Case, world: int, efficiency: Efficiency | None = None) -> float:
    """The whole step of a run that does not offload, with its CUDA graphs."""
    with _quiet(), _older(case):
        job = _job(case, world, graphs=True)
        model = _problem_of(case, job, efficiency)
        return model.cost(_own_policy(model, job)).step_ms + model.profile.step_end_ms


def _own_policy(model: Problem, job: Job) -> RecomputePolicy:
    layers = model.profile.model.num_layers
    chunks = [[i for i in chunk if i < layers] for chunk in model.layout.chunk_layers()]
    return RecomputePolicy.parse(
        setting(job.config),
        num_layers=model.profile.num_layers,
        layout=chunks,
        depth_layers=0 if job.pattern is None else len(job.pattern.depth),
    )


def job_of(flags: Sequence[str], world: int, *, graphs: bool = False) -> Job:
    """The job of a run. Megatron 0.19 refuses Transformer Engine's cross entropy, and deterministic
    mode with `--tp-comm-overlap`, with which older runs were made; the model can still be built
    with both. Runs report what torch allocated, to which the pool of a CUDA graph adds nothing but
    while it is captured, so that graphs are left out unless asked for, as for times."""
    older: dict[str, Any] = {} if graphs else {"cuda_graph_impl": "none"}
    refused = [*_pairs(flags, "--cross-entropy-fusion-impl", "te")]
    if refused:
        older["cross_entropy_fusion_impl"] = "te"
    if {"--tp-comm-overlap", "--deterministic-mode"} <= {*flags}:
        refused.append(flags.index("--deterministic-mode"))
        older["deterministic_mode"] = True
    rest = [flag for number, flag in enumerate(flags) if number not in refused]
    job = job_from_flags(rest, world)
    return replace(job, config={**job.config, **older})


def _pairs(flags: Sequence[str], name: str, value: str) -> Iterator[int]:
    for number, pair in enumerate(itertools.pairwise(flags)):
        if pair == (name, value):
            yield from (number, number + 1)


def _of_world(case: Case, world: int) -> Prediction:
    if _job(case, world).config.get("fine_grained_activation_offloading"):
        return _of_own_setting(case, world)
    model, job = _problem(case, world)
    policy = _own_policy(model, job)
    cost = model.cost(policy)
    asked = {range(len(cost.stages))[stage] for stage in case.measured_stages}
    asks = {"evaluates": case.evaluates, "expandable": _has(case, "expandable_segments")}
    blocks = {one: rounding(job, device(case.gpu), policy, one, **asks) for one in asked}
    stages = [_stage(one, blocks.get(stage)) for stage, one in enumerate(cost.stages)]
    graph_job = _job(case, world, graphs=True)
    if graph_job.graphs.implementation != "none":
        model = _problem_of(case, graph_job)
        cost = model.cost(policy)
    if counts_graphs(graph_job):
        for stage, own in blocks.items():
            stages[stage] = _with_capture(stages[stage], cost.stages[stage], own)
    return Prediction(tuple(stages), world, cost.step_ms + model.profile.step_end_ms)


def _with_capture(stage: Stage, cost: StageCost, blocks: Rounding) -> Stage:
    """A stage whose graphs are captured before its first step, all of them in one pool. Later what
    they save is in the pool, where torch does not report it: if that is most of the job, its
    highest moment is the capture."""
    peak = cost.peak
    first_bytes = peak.breakdown.static_bytes - blocks.moments_bytes + peak.pool_bytes
    if first_bytes <= peak.bytes - peak.pool_bytes:
        return stage
    return replace(
        stage, peak_bytes=first_bytes, moment="capture of CUDA graphs", first_step_bytes=first_bytes
    )


def _of_encoder_decoder(case: Case, sizes: tuple[int, int, int]) -> Prediction:
    """T5: what Megatron's own schedule holds on meta tensors."""
    world = case.worlds[0]
    job, expandable = _job(case, world), _has(case, "expandable_segments")
    need = encoder_decoder_need(job, *sizes, device(case.gpu), expandable=expandable)
    return Prediction((_needed(need),), world)


def _of_own_setting(case: Case, world: int) -> Prediction:
    """A run that offloads: the stages asked for, as Megatron's own schedule and its manager of
    copies run them. What torch reports as allocated is free before its copy has ended, so that
    copies take no time here; with them the step is not predicted."""
    job, gpu = _job(case, world), device(case.gpu)
    expandable, number = _has(case, "expandable_segments"), job.layout().num_stages
    asked = {range(number)[stage] for stage in case.measured_stages}
    needs = {stage: own_need(job, gpu, stage, expandable=expandable) for stage in asked}
    found = {stage: _needed(need) for stage, need in needs.items()}
    return Prediction(tuple(found.get(stage, UNASKED) for stage in range(number)), world)


def _needed(need: Need) -> Stage:
    parts = {"static": need.static_bytes, "activations": need.activation_bytes}
    parts["blocks"] = need.rounding_bytes
    return Stage(need.peak_bytes, need.moment, need.first_step_bytes, parts)


UNASKED = Stage(0, "not asked for", None, {})


def _stage(cost: StageCost, blocks: Rounding | None) -> Stage:
    parts = cost.peak.breakdown
    more_bytes, first_bytes = 0, None
    if blocks:
        more_bytes = blocks.peak_bytes
        first_bytes = cost.peak_high_bytes - blocks.moments_bytes + blocks.first_peak_bytes
    names = ("static", "in_flight", "running", "transient", "embedding_head", "overhead", "graph")
    by_name = {name: int(getattr(parts, f"{name}_bytes")) for name in names}
    by_name["blocks"] = more_bytes
    peak_bytes, moment = cost.peak_high_bytes + more_bytes, cost.peak.moment
    if blocks and blocks.evaluation_bytes > peak_bytes:
        peak_bytes, moment = blocks.evaluation_bytes, "evaluation"
    return Stage(peak_bytes, moment, first_bytes, by_name)


def setting(config: dict[str, Any]) -> str:
    """The run's own recompute setting in the policy grammar."""
    granularity = config.get("recompute_granularity")
    if config.get("cpu_offloading"):
        return f"megatron:cpu_offloading/{config['cpu_offloading_num_layers']}"
    if granularity == "full":
        number = config.get("recompute_num_layers")
        method = config.get("recompute_method")
        if method == "block" and not number:
            return "megatron:none"
        return f"megatron:{method}/{number}"
    if granularity == "selective":
        return f"megatron:selective[{'+'.join(config['recompute_modules'])}]"
    return "megatron:none"
