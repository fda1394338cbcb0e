"""What is proven of a step is said in the same words by programs, files and documentation."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_autorecompute.planner.search.solution import OPTIMAL, StepEvidence, nearness
from megatron_autorecompute.report.words import proof
from tests.report.plans import random_plan

PLAN = random_plan(5)
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUTS = sorted((ROOT / "benchmarks" / "results").rglob("*.txt"))
WRITERS = sorted((ROOT / "megatron_autorecompute").rglob("*.py"))
OTHER_WORDS = re.compile(
    r"proven (?:to be )?(?:the )?(?:best|fastest)|within \S+% of the best", re.I
)
WITHIN = re.compile(r"proven within (\S+) of the (\w+)", re.I)


def one_line(path: Path) -> str:
    return " ".join(path.read_text().split())


@pytest.mark.parametrize("gap", [0.0, 0.007])
def test_the_page_explains_the_very_words_of_a_plan(gap):
    evidence = StepEvidence(PLAN.cost.step_ms * (1 - gap), gap)
    said = f"The step is proven {nearness(gap)}"
    assert proof(replace(PLAN, step_evidence=evidence)).startswith(
        f"{said} in this model: no choices that fit"
    )
    assert f"`{said}` stands for a gap of" in one_line(ROOT / "docs" / "plan.md")


def test_all_else_uses_these_words_and_the_readme_says_where_they_are_explained():
    for path in (*PAGES, *OUTPUTS):
        text = one_line(path)
        assert not OTHER_WORDS.search(text), path
        for share, what in WITHIN.findall(text):
            assert re.fullmatch(r"\d+\.\d{3}%|a", share), (path, share)
            assert what in ("optimum", "stated"), (path, what)
    assert "docs/plan.md#what-is-proven" in (ROOT / "README.md").read_text()
    assert sum("% of the optimum" in path.read_text() for path in WRITERS) == 1
    assert nearness(0) == OPTIMAL
