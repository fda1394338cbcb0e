"""Profiles measured on synthetic jobs whose true times are known, with noise of a known size."""

import random
import statistics
from dataclasses import replace

from megatron_autorecompute.planner.cost.step_time import replay_ms
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import MeasuredStep, StageRecord, StaticBytes, in_order
from tests.planner.search.random_steps import realistic_step

SHAPES = ((1, 1), (2, 1), (3, 1), (2, 2))


_ABOVE = statistics.NormalDist().inv_cdf(0.75)
"""By so many standard deviations the mean of runs is above their lower quartile."""


class Job:
    """A job of true times, and a profile of it.

    Runs of a record are normal, and their lower quartile is its true time. In most jobs a stage
    takes longer than its layers: in some by the same under every policy, in others by a share of
    its work. The step that shows this ran the policy that recomputes most.

    Args:
        seed: of everything.
        recompute: how much of its time recompute takes; little makes policies alike.
    """

    def __init__(self, seed, recompute=1.0):
        rng = random.Random(seed)
        drawn, self.budgets = realistic_step(seed, SHAPES, 3)
        profile = _with_recompute_of(drawn.profile, recompute)
        same, self.share = rng.choice([(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
        self.true = replace(drawn, profile=profile)
        lean = RecomputePolicy(
            tuple(
                max(profile.kind_of(layer).choices, key=lambda r: r.backward_ms).policy
                for layer in range(profile.num_layers)
            )
        )
        work = [sum(s.forward_ms) + sum(s.backward_ms) for s in self.true.cost(lean).stages]
        self.true = self._with_residuals(self.true, [same * one for one in work])
        measured = _measured_profile(rng, profile)
        step = MeasuredStep(1, lean.format(), self.true.schedule.num_microbatches, ())
        measured = replace(self.true, profile=replace(measured, measured_step=step))
        seen = [sum(s.forward_ms) + sum(s.backward_ms) for s in measured.cost(lean).stages]
        left = [(1 + same + self.share) * t - m for t, m in zip(work, seen, strict=True)]
        self.measured = self._with_residuals(measured, left)

    def _with_residuals(self, problem, residuals_ms):
        stages = []
        for chunks, ms in zip(problem.layout.stages, residuals_ms, strict=True):
            layers = tuple(layer for chunk in chunks for layer in chunk.layers)
            parts = len(layers) + sum(chunk.embedding + chunk.head for chunk in chunks)
            stages.append(StageRecord(layers, StaticBytes(parts), residual_ms=ms))
        if not any(residuals_ms):
            return problem
        return replace(problem, profile=replace(problem.profile, stages=tuple(stages)))

    def true_ms(self, policy):
        """The step that the true times make."""
        stages = self.true.cost(policy).stages
        more = 1 + self.share
        times = [
            [[more * ms for ms in getattr(stage, name)] for stage in stages]
            for name in ("forward_ms", "backward_ms", "ahead_ms")
        ]
        return replay_ms(self.true.schedule, *times[: 2 + policy.is_ahead])


def _with_recompute_of(profile, share):
    kinds = []
    for kind in profile.kinds:
        least = min(record.backward_ms for record in kind.choices)
        choices = (
            replace(r, backward_ms=least + share * (r.backward_ms - least)) for r in kind.choices
        )
        kinds.append(replace(kind, choices=tuple(choices)))
    return replace(profile, kinds=tuple(kinds))


def _measured_profile(rng, profile):
    noise, runs = rng.uniform(0.005, 0.08), rng.randint(6, 48)
    kinds = []
    for kind in profile.kinds:
        records = [measured_record(rng, record, noise, runs) for record in kind.choices]
        kinds.append(replace(kind, choices=in_order(records, [runs] * len(records))))
    return replace(
        profile,
        kinds=tuple(kinds),
        embedding=measured_record(rng, profile.embedding, noise, runs),
        head=measured_record(rng, profile.head, noise, runs),
    )


def measured_record(rng, record, noise, runs):
    forward, backward = (
        [max(0.0, true_ms * (1 + noise * (_ABOVE + rng.gauss(0, 1)))) for _ in range(runs)]
        for true_ms in (record.forward_ms, record.backward_ms)
    )
    return replace(
        record,
        forward_ms=_quartile(forward),
        backward_ms=_quartile(backward),
        spread_ms=_half_middle_half(forward) + _half_middle_half(backward),
        runs=runs,
    )


def _quartile(values):
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _half_middle_half(values):
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2
