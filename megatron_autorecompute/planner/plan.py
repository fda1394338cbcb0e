"""The plan: a policy with its predicted cost, the proof and the profile, as one file.

A plan contains the profile it was made from, so that it can be explained, verified and solved again
wherever the file is. `RecomputePolicy.load` reads only the policy from the same file. This module
neither solves nor prints.

Figures that follow from policy, profile, layout, schedule and budgets are computed again when a
plan is read. The proof that no other policy is faster would take a search. So a file contains a
digest of what was written; if the digest does not match, the plan is read without its proof.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_autorecompute import json_records
from megatron_autorecompute.block_names import MEGATRON
from megatron_autorecompute.errors import AutorecomputeError, ProfileError
from megatron_autorecompute.planner.cost.copies import host_link
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_interval import StepErrors, StepInterval
from megatron_autorecompute.planner.search.manual import (
    ManualStrategy,
    best_manual,
    fits,
    may_offload,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import (
    Solution,
    StageEvidence,
    StepEvidence,
    simpler_within_errors,
    stage_evidence,
)
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.planner.search.stage_problem import EARLY
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Bytes, Choice, Profile, Version
from megatron_autorecompute.units import gib

SCHEMA_VERSION = 1
DIGEST = "digest"
"""Additional field of a plan file: the digest of everything else in it, as it was written."""
TOLERANCE = 1e-9
"""How far a time may be from the same sum on another machine, as a share of it."""
WITH_OFFLOAD = "With offload"
"""How the sentence begins that says what offload gains."""
NOTHING_PROVEN = StepEvidence(None, None)
BudgetBytes = Annotated[int, Field(gt=0, le=1 << 60)]


@dataclass(frozen=True, slots=True)
class ManualResult:
    """One of Megatron's own settings in the same model."""

    name: str
    """The name as `RecomputePolicy.parse` reads it: megatron:block/4, ..."""
    step_ms: float
    """The predicted time of the step."""
    peak_high_bytes: int
    """The predicted peak of the fullest stage, at its high end."""
    fits: bool
    """Whether every stage is within its budget."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A solved policy with its evidence: what `plan -o` writes. See docs/plan.md.

    `make_plan` makes a plan, `save(path)` writes it, and `Plan.load(path)` reads one and computes
    its figures again. `apply` takes its `policy`; `problem()` is what it solves, also for other
    budgets. `_bytes` are bytes on one device, `_ms` milliseconds; lists per stage start with stage
    0.
    """

    recompute_policy: tuple[Choice, ...]
    """One choice per layer, as a config field takes it."""
    layout: Layout
    """The layers of each stage and chunk."""
    schedule: Schedule
    """The order of forwards and backwards."""
    budget_bytes: tuple[BudgetBytes, ...]
    """Bytes that torch may allocate, for each stage."""
    cost: PolicyCost
    """Predicted peaks with their breakdown, and times."""
    evidence: tuple[StageEvidence, ...]
    """The busy time of each stage, and the moment that binds."""
    profile: Profile
    """The profile that the prediction rests on, with fingerprint and assumptions."""
    step_evidence: StepEvidence = NOTHING_PROVEN
    """How far the step is from the shortest one. Plans of earlier versions do not say."""
    imbalance_percentile: Annotated[float | None, Field(gt=0, le=100)] = None
    """The imbalance percentile of layers with experts; None: their records are used unchanged."""
    allowed: tuple[str, ...] | None = None
    """Choices that the plan was allowed to use; None: every recorded choice."""
    step_interval: StepInterval | None = None
    """The interval of the step of the true times; None: no time is known to err."""
    best_manual: ManualResult | None = None
    """The fastest of Megatron's own settings that fits; None: none fits."""
    megatron_flags: Mapping[str, str] = field(default_factory=dict)
    """Megatron's flags for a searched layout or micro-batch size."""
    notes: tuple[str, ...] = ()
    """Sentences about what was searched or corrected."""
    measured_peak_bytes: tuple[Bytes, ...] = ()
    """The job's own peak of each stage in a step under this plan; empty: no job has run it."""
    schema_version: Version = SCHEMA_VERSION
    """Major version of this schema; added fields do not raise it."""

    def __post_init__(self) -> None:
        if len(self.recompute_policy) != self.profile.num_layers:
            raise ValueError(
                f"recompute_policy has {len(self.recompute_policy)} choices, the profile's model "
                f"{self.profile.num_layers} layers"
            )
        for name, values in (
            ("budget_bytes", self.budget_bytes),
            ("evidence", self.evidence),
            ("cost.stages", self.cost.stages),
            ("measured_peak_bytes", self.measured_peak_bytes or self.budget_bytes),
        ):
            if len(values) != self.layout.num_stages:
                raise ValueError(
                    f"{name} has {len(values)} entries, the layout {self.layout.num_stages} stages"
                )

    @property
    def policy(self) -> RecomputePolicy:
        """The policy, parsed. Raises: PolicyError if a text is not a choice."""
        return RecomputePolicy.from_config(
            list(self.recompute_policy), num_layers=len(self.recompute_policy)
        )

    @property
    def proven(self) -> bool:
        """Whether the evidence says how near the optimum is: the solver did, of this very plan."""
        return self.step_evidence.gap is not None

    def problem(self) -> Problem:
        """The question that the plan answers."""
        return Problem(
            self.profile,
            self.layout,
            self.schedule,
            self.budget_bytes,
            self.imbalance_percentile,
            self.allowed,
        )

    def to_json(self, beside: Mapping[str, Any] | None = None) -> str:
        """JSON text with its digest, checked against the schema.

        beside: further fields, which a reader of plans ignores.
        """
        data = {**json.loads(json_records.to_json(self)), **(beside or {})}
        return json.dumps({**data, DIGEST: json_records.digest(data)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "The plan") -> Plan:
        """Read and check a plan, and compute its figures again.

        If the text was changed or has no digest, or its figures differ because another version of
        this package predicted them, the plan gets this version's figures, and no proof.

        Raises: ProfileError with the path of each bad field, or for a changed text whose policy
        does not fit the budgets or is not made of what is allowed.
        """
        if json_records.has_fields(text, "kinds", "parallelism"):
            raise ProfileError(
                f"{source} is a profile, and a plan was asked for. Make one of it: "
                f"megatron-autorecompute plan --profile {source} --budget-gib GIB -o PLAN.json"
            )
        plan = json_records.from_json(cls, text, source=source, major=SCHEMA_VERSION)
        data = json.loads(text)
        return _checked(
            plan, source, as_written=data.pop(DIGEST, None) == json_records.digest(data)
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as a whole or not at all."""
        json_records.write_atomically(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file; raises ProfileError. See `from_json`."""
        return cls.from_json(json_records.read(path, cls.__name__), str(path))


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Parts in which two fingerprints differ, each as `name: was, now is`."""
    pairs = [(n, was.get(n, "absent"), now.get(n, "absent")) for n in sorted({*was, *now})]
    return tuple(
        f"{name}: {before}, now {after}" for name, before, after in pairs if before != after
    )


def make_plan(
    problem: Problem,
    *,
    megatron_flags: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Solve, and make a plan of the solution.

    Args:
        problem: with its budgets.
        megatron_flags: further flags that the plan needs, name to value.
        notes: sentences about earlier searches, or the notes of a plan that this one replaces: what
            they say of its solution is left out.

    Raises: as `solve`.
    """
    fastest = solve(problem)
    manual = best_manual(problem)
    solution, gave_way = simpler_within_errors(problem, fastest, manual)
    gains = [_bought(problem, solution)] if may_offload(problem) else []
    return Plan(
        recompute_policy=tuple(solution.policy.to_config()),
        layout=problem.layout,
        schedule=problem.schedule,
        budget_bytes=problem.budgets,
        cost=solution.cost,
        evidence=stage_evidence(problem, solution.policy),
        step_evidence=solution.step_evidence,
        step_interval=StepErrors(problem.costs, solution.policy).interval(),
        profile=problem.profile,
        imbalance_percentile=problem.imbalance_percentile,
        allowed=problem.only.texts(),
        best_manual=_result(manual),
        megatron_flags=dict(megatron_flags or {}),
        notes=(
            *(note for note in notes if not note.startswith((MEGATRON, WITH_OFFLOAD))),
            *gave_way,
            *gains,
        ),
    )


def plan_early_if_it_pays(problem: Problem, notes: Sequence[str] = ()) -> Plan:
    """A plan in which layers recompute ahead, if even the slow end of its interval is shorter than
    the step of the plan without. Raises: as `solve`."""
    plan = make_plan(problem, notes=notes)
    if problem.layout.num_stages == 1:
        return plan
    early = make_plan(replace(problem, allowed=(EARLY,)), notes=notes)
    interval = early.step_interval
    slow_ms = early.cost.step_ms if interval is None else interval.high_ms
    return early if early.policy.is_ahead and slow_ms < plan.cost.step_ms else plan


def _result(manual: ManualStrategy | None) -> ManualResult | None:
    if manual is None:
        return None
    return ManualResult(manual.name, manual.cost.step_ms, manual.cost.peak_high_bytes, True)


def _bought(problem: Problem, solution: Solution) -> str:
    """The sentence that says what offload gains at these budgets."""
    cost, plain_ms, link = solution.cost, solution.without_offload_ms, host_link(problem.profile)
    if plain_ms is None or not any(stage.host_bytes for stage in cost.stages):
        return f"{WITH_OFFLOAD} nothing faster was found at these budgets: the plan has none."
    host = gib(max(stage.host_bytes for stage in cost.stages))
    plain = "nothing fits" if math.isinf(plain_ms) else f"{plain_ms:,.1f} ms"
    return (
        f"{WITH_OFFLOAD} the step takes {cost.step_ms:,.1f} ms, of which it waits "
        f"{cost.stall_ms:,.1f} ms for copies, and takes {host} GiB of host memory per device; "
        f"without it {plain}, at these budgets, with {link.to_host_gb_per_s:g} GB/s to host "
        f"memory and {link.to_device_gb_per_s:g} GB/s back."
    )


# --- what a file says against what its profile gives ----------------------------------------------


def _checked(plan: Plan, source: str, *, as_written: bool) -> Plan:
    try:
        problem, policy = plan.problem(), plan.policy
        cost = problem.cost(policy)
        same = _same(astuple(plan.cost), astuple(cost))
        if as_written and same:
            return plan
        if not as_written and not (problem.may_be(policy) and fits(problem, policy)):
            raise ProfileError(
                "it was changed after it was written, and its policy needs more than budget_bytes "
                "or has choices that are not in allowed. To run that policy give "
                "--recompute-policy @FILE, which reads no figures; to plan again give the file to "
                "plan --profile"
            )
        right = replace(
            plan,
            cost=cost,
            evidence=stage_evidence(problem, policy),
            step_evidence=NOTHING_PROVEN,
            step_interval=StepErrors(problem.costs, policy).interval(),
            best_manual=_result(best_manual(problem)),
        )
    except AutorecomputeError as error:
        raise ProfileError(f"{source} holds no plan that could run: {error}") from error
    if not as_written:
        right = replace(right, measured_peak_bytes=())
    if same:
        return right
    note = f"The file said {plan.cost.step_ms:,.1f} ms a step; the figures are this version's."
    return replace(right, notes=(*plan.notes, note))


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(found == expected)
