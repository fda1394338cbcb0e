"""The words for what is proven say no more than the plan's own bound does."""

from dataclasses import replace

import pytest

from megatron_autorecompute.planner.search.solution import StepEvidence
from megatron_autorecompute.report.words import proof
from tests.report.plans import random_plan

PLAN = random_plan(5)


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.0, "The step is proven optimal"),
        (1e-9, "The step is proven within 0.001% of the optimum"),
        (0.00123401, "The step is proven within 0.124% of the optimum"),
        (None, "Not proven: "),
    ],
)
def test_a_gap_is_rounded_up_and_only_none_is_called_optimal(gap, words):
    evidence = StepEvidence(None if gap is None else PLAN.cost.step_ms * (1 - gap), gap)
    assert proof(replace(PLAN, step_evidence=evidence)).startswith(words)
