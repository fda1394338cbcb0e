"""The page of the solver's speed: its gaps are of today's code."""

import pytest

from benchmarks import solve_speed
from benchmarks.solve_speed import Case

pytestmark = pytest.mark.any_version


def test_the_page_is_made_of_the_results():
    page = solve_speed.page(solve_speed.known(), solve_speed.known_reuse())
    assert solve_speed.RESULTS.with_suffix(".md").read_text() == page


@pytest.mark.parametrize("case", [Case(32, 4, 2), Case(32, 4, 2, microbatches=65536)], ids=str)
def test_a_gap_of_the_page_is_what_todays_code_leaves(case):
    low, high = solve_speed.needs(solve_speed.problem(case))
    found = max(gap for _, gap in solve_speed.solves(case, low, high))
    (stored,) = [one.worst_gap for one in solve_speed.known() if one.case == case]
    assert found == pytest.approx(stored, abs=1e-9), "python -m benchmarks.solve_speed"
