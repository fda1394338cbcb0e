import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tables_are_those_of_the_result_files():
    updated = runpy.run_path(str(ROOT / "scripts/update_readme.py"))["updated"]
    assert "<!-- table: " in README
    assert updated(README) == README


def test_every_file_that_documents_link_to_exists():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
        missing = [link for link in links if not (page.parent / link).exists()]
        assert not missing, (page, missing)


def test_every_error_class_has_its_exit_code_documented():
    from megatron_autorecompute import errors

    documented = (ROOT / "docs/exit-codes.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AutorecomputeError):
            assert f"| {value.exit_code} | `{name}` |" in documented
