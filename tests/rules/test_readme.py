import ast
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_what_pages_quote_is_what_the_result_files_say():
    script = runpy.run_path(str(ROOT / "scripts/quote_results.py"))
    pages = [page.read_text() for page in script["PAGES"]]
    assert sum(page.count("<!-- quoted: ") for page in pages) >= 4
    assert [script["updated"](page) for page in pages] == pages


def test_every_file_that_documents_link_to_exists():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
        missing = [link for link in links if not (page.parent / link).exists()]
        assert not missing, (page, missing)


def anchors(page):
    """Of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_heading_that_documents_link_to_exists():
    linked = 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text()):
            target = page.parent / path if path else page
            assert anchor in anchors(target), (page, path, anchor)
            linked += 1
    assert linked > 20


def test_the_version_is_the_same_wherever_it_is_said():
    from megatron_autorecompute import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_make_help_lists_every_target_that_is_for_people():
    # Within `make test`, the flags of that run would be this one's too.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "help"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environ
    )
    names = {line.split()[0] for line in listed.stdout.splitlines()}
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    parts = {
        "quick-search",
        "quick-others",
        "quick-lint",
        "test-once",
        "test-shown",
        "test-planner",
    }
    assert set(targets.split()) - parts - {"test-core-016", "test-core-019"} == names


def test_every_error_class_has_its_exit_code_documented():
    from megatron_autorecompute import errors

    documented = (ROOT / "docs/exit-codes.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AutorecomputeError):
            assert f"| {value.exit_code} | `{name}` |" in documented


FIGURE = re.compile(r"(?<![\w.,])[-+]?\d[\d,.]*\s?(?:%|ms\b|s\b|seconds\b|minutes\b|[kKMGT]i?B\b)")
"""A number with a unit of bytes or time, or a share."""
OF_RESULTS = re.compile(
    r"\b(predict(s|ed|ions?)|modelled|(this|the|our) model|errors?|off by|proven|solves?|"
    r"too (high|low|long|fast|slow))\b",
    re.IGNORECASE,
)
"""Words of a sentence that says what this package found, or how near it is."""
TAKEN = (
    r"<!-- (quoted|table): .*?<!-- end of (quote|table) -->",
    r"<!-- cell: .*?<!-- end of cell -->",
    r"```.*?```",
    r"^\|.*?$",
    r"`[^`]*`",
)
"""What is no typed figure: quotes and tables, and as code what a program has or prints."""


def typed_results(text):
    """Sentences with a typed figure of a result, but for those that link to the run they are of."""
    for pattern in TAKEN:
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    for sentence in re.split(r"[.:;!?][)*]*\s|\n\s*\n|\n\s*[-*] ", text):
        sourced = "/benchmarks/results/" in sentence
        if FIGURE.search(sentence) and OF_RESULTS.search(sentence) and not sourced:
            yield " ".join(sentence.split())


def texts(path):
    """The strings of a program, but for those that explain it."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_no_figure_of_a_result_is_typed_into_the_prose_of_a_page():
    written = [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    found = [(path.name, s) for path in written for t in texts(path) for s in typed_results(t)]
    by_programs = re.compile(r"^Written by `", re.MULTILINE)
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        text = page.read_text()
        if not by_programs.search(text):
            found += [(page.name, sentence) for sentence in typed_results(text)]
    assert not found, "\n".join(f"{name}: {sentence}" for name, sentence in found)


def test_a_typed_figure_of_a_result_is_found():
    assert list(typed_results("A page. Steps are\npredicted 5.7 to 8.3% too high. More."))
    cell = "<!-- cell: a.md ; all ; median -->8.3%<!-- end of cell -->"
    run = "[the run](../benchmarks/results/gpu/7)"
    for fine in (f"Predicted {cell} too high.", f"{run} took 3% more than predicted.", "80 GB."):
        assert not list(typed_results(fine))


@pytest.mark.parametrize(
    "program", ["scripts/nvidia_recipes", "benchmarks/bridge_recipes", "scripts/offload_recipes"]
)
def test_a_page_says_what_its_program_would_write_today(program):
    page = (ROOT / f"benchmarks/results/{Path(program).name}.md").read_text()
    paragraphs = [text for text in texts(ROOT / f"{program}.py") if text.count("\n") > 1]
    assert paragraphs
    assert [text for text in paragraphs if "{" not in text and text.strip() not in page] == []
