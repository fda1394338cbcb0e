"""docs/api.md: the names it lists are the package's, and its example prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import megatron_autorecompute

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/api.md").read_text()


def test_the_page_lists_every_public_name_and_no_other():
    table = PAGE.split("## Example")[0]
    listed = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert sorted(listed) == sorted(megatron_autorecompute.__all__)


def test_the_example_prints_what_the_page_says_and_loads_no_torch():
    code, printed = (
        re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]
        for language in ("python", "text")
    )
    check = "\nimport sys\nassert not {'torch', 'megatron'} & set(sys.modules)\n"
    ran = subprocess.run(
        [sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == printed
