"""The plan: a policy together with everything that speaks for it, as one file.

A plan contains the profile it rests on, so that it can be explained, verified and solved again
wherever the file is. `RecomputePolicy.load` reads the same file for the policy alone. This module
does not solve and does not print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_autorecompute import records
from megatron_autorecompute.cost_model import PolicyCost
from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.pipeline import Layout, Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.solve import (
    Budget,
    ManualStrategy,
    ParetoPoint,
    Planner,
    StageEvidence,
    best_manual,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One plan of the time-against-budget curve, for stepping down when memory runs short."""

    budget_bytes: int
    """Of every stage."""
    step_ms: float
    """Predicted time of the step."""
    peak_high_bytes: int
    """Predicted peak of the fullest stage, high end."""
    recompute_policy: str
    """As `RecomputePolicy.parse` reads it."""


@dataclass(frozen=True, slots=True)
class ManualResult:
    """One of Megatron's own settings in the same model."""

    name: str
    """As `RecomputePolicy.parse` reads it: megatron:block/4, ..."""
    step_ms: float
    """Predicted time of the step."""
    peak_high_bytes: int
    """Predicted peak of the fullest stage, high end."""
    fits: bool
    """Whether every stage is within its budget."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A solved policy with its evidence. See docs/plan.md."""

    recompute_policy: tuple[str, ...]
    """One choice per layer, what a config field takes."""
    layout: Layout
    """Which stage and chunk holds which layers."""
    schedule: Schedule
    """Order of forwards and backwards."""
    budget_bytes: tuple[int, ...]
    """Per stage, bytes that torch may allocate."""
    cost: PolicyCost
    """Predicted peaks with their breakdown, and times."""
    evidence: tuple[StageEvidence, ...]
    """Objective, bound, gap and binding constraint per stage."""
    profile: Profile
    """What the prediction rests on, fingerprint and assumptions included."""
    moe_percentile: float | None = None
    """Imbalance budgeted for, in percent; None is the measured routing."""
    allowed: tuple[str, ...] | None = None
    """Choices that might be used; None is every recorded one."""
    best_manual: ManualResult | None = None
    """The fastest of Megatron's own settings that fits; None when none does."""
    curve: tuple[CurvePoint, ...] = ()
    """Largest budget first."""
    megatron_flags: Mapping[str, str] = field(default_factory=dict)
    """Flags other than recompute that the plan asks for: a searched layout or micro-batch size."""
    notes: tuple[str, ...] = ()
    """What the searches found, one sentence each."""
    schema_version: int = SCHEMA_VERSION
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
        ):
            if len(values) != self.layout.num_stages:
                raise ValueError(
                    f"{name} has {len(values)} entries, the layout {self.layout.num_stages} stages"
                )

    @property
    def policy(self) -> RecomputePolicy:
        """The policy as a value."""
        return RecomputePolicy.from_config(
            list(self.recompute_policy), num_layers=len(self.recompute_policy)
        )

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What must be equal for the plan to be used again."""
        return self.profile.fingerprint

    def changed(self, fingerprint: Mapping[str, str]) -> tuple[str, ...]:
        """Parts of a fingerprint that differ from the plan's, one `name: was, is` each."""
        names = sorted(set(self.fingerprint) | set(fingerprint))
        pairs = [
            (n, self.fingerprint.get(n, "absent"), fingerprint.get(n, "absent")) for n in names
        ]
        return tuple(f"{name}: {was}, now {now}" for name, was, now in pairs if was != now)

    def planner(self) -> Planner:
        """A planner for the plan's own profile, layout and schedule."""
        return Planner(
            self.profile,
            self.layout,
            self.schedule,
            percentile=self.moe_percentile,
            allowed=self.allowed,
        )

    def to_json(self) -> str:
        """JSON text, checked against the schema."""
        return records.to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "The plan") -> Plan:
        """Read and check; raises ProfileError with the path of each bad field."""
        return records.from_json(cls, text, source=source, major=SCHEMA_VERSION)

    def save(self, path: str | Path) -> None:
        """Write atomically."""
        records.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file; raises ProfileError."""
        return records.load(cls, path, major=SCHEMA_VERSION)


def make_plan(
    planner: Planner,
    budget: Budget,
    *,
    curve_points: int = 0,
    megatron_flags: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Solve and put the evidence together.

    Args:
        budget: bytes, one for all stages or one each.
        curve_points: budgets of the stepping-down curve; 0 leaves it out.

    Raises: InfeasibleError, ProfileError.
    """
    solution = planner.solve(budget)
    budgets = tuple(item.budget_bytes for item in solution.evidence)
    manual = best_manual(planner.manual_strategies(budgets))
    return Plan(
        recompute_policy=tuple(solution.policy.to_config()),
        layout=planner.layout,
        schedule=planner.schedule,
        budget_bytes=budgets,
        cost=solution.cost,
        evidence=solution.evidence,
        profile=planner.profile,
        moe_percentile=planner.percentile,
        allowed=planner.allowed,
        best_manual=_result(manual) if manual else None,
        curve=tuple(curve_point(p) for p in planner.pareto(curve_points)) if curve_points else (),
        megatron_flags=dict(megatron_flags or {}),
        notes=tuple(notes),
    )


def curve_point(point: ParetoPoint) -> CurvePoint:
    """A Pareto point with its policy as text."""
    return CurvePoint(
        point.budget_bytes, point.step_ms, point.peak_high_bytes, point.policy.format()
    )


def _result(manual: ManualStrategy) -> ManualResult:
    if manual.cost is None:
        raise ProfileError(f"{manual.name} has no cost: {manual.refused}.")
    return ManualResult(manual.name, manual.cost.step_ms, manual.cost.peak_high_bytes, manual.fits)
