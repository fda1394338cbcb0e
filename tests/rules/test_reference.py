"""Pages take fields, commands and exit codes from the code: scripts/reference.py writes them."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/reference.py"))


def test_every_table_is_as_the_code_has_it_now():
    pages = {page.name: page.read_text() for page in SCRIPT["PAGES"]}
    assert [name for name, text in pages.items() if SCRIPT["updated"](text) != text] == []
    written = {name for name, text in pages.items() if "<!-- end of reference -->" in text}
    assert written == {"exit-codes.md", "files.md"}


def test_every_field_of_a_profile_a_plan_and_a_job_is_explained():
    for part in re.split(r"^## ", (ROOT / "docs/files.md").read_text(), flags=re.MULTILINE)[1:]:
        rows = [line for line in part.splitlines() if "| `" in line]
        assert len(rows) > 40
        assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(("said", "row"), [("profile.Imbalance", "| `factor` | number |")])
def test_a_table_that_is_not_the_codes_is_written_again(said, row):
    page = f"<!-- fields: {said} -->\n| old |\n<!-- end of reference -->\n"
    assert row in SCRIPT["updated"](page)
    assert "old" not in SCRIPT["updated"](page)
