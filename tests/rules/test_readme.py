import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_what_pages_quote_is_what_the_result_files_say():
    script = runpy.run_path(str(ROOT / "scripts/quote_results.py"))
    pages = [page.read_text() for page in script["PAGES"]]
    assert sum(page.count("<!-- quoted: ") for page in pages) >= 4
    assert [script["updated"](page) for page in pages] == pages


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
