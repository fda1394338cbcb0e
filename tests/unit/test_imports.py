"""Importing changes nothing, and folders say who may know what: imports point one way only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_autorecompute"
HEAVY = {"torch", "megatron"}
SHARED = {
    "errors",
    "json_records",
    "packages",
    "policy",
    "profile",
    "temporary",
    "units",
    "work_order",
}
"""Words that every part may use."""
SHOWN = {
    "auto_options",
    "auto_rules",
    "auto_text",
    "budget",
    "cli",
    "cli_report",
    "comparison",
    "manual_search",
    "options",
    "report",
    "terminal",
}
"""What is asked and shown, where there is no torch, too."""
LIGHT = {"__init__", "planner", *SHARED, *SHOWN}
ENTRIES = {"pretrain", "__main__"}  # what `python -m` starts


def heavy_modules_after(code: str) -> set[str]:
    """Which of torch and megatron a fresh interpreter has imported once it ran `code`."""
    ask = f"{code}\nimport sys\nprint(*({HEAVY!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(ran.stdout.split())


def imports(source: str) -> set[str]:
    """All that a source imports, in functions too: whole names of ours, else the outermost name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not followed here"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name if name.startswith(f"{PACKAGE}.") else name.split(".")[0] for name in found}


def part(module: str) -> str:
    """The folder or module of the package that a module is in; of others their outermost name."""
    words = module.split(".")
    return words[1] if words[0] == PACKAGE and len(words) > 1 else words[0]


def reached(start: str, imported: dict[str, set[str]]) -> set[str]:
    """All that importing `start` can import, itself included."""
    seen: set[str] = set()
    waiting = {start}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= imported.get(name, set()) - seen
    return seen


@pytest.fixture(scope="module")
def by_module() -> dict[str, set[str]]:
    """What each module of the package imports."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        words = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(words)] = imports(path.read_text())
    # By name, when it is asked for: importing the package reaches nothing.
    found[f"{PACKAGE}.__init__"] = set()
    return found


@pytest.fixture(scope="module")
def imported(by_module) -> dict[str, set[str]]:
    """What each part of the package imports."""
    found: dict[str, set[str]] = {}
    for module, names in by_module.items():
        found.setdefault(part(module), set()).update(map(part, names))
    return found


def test_the_planner_and_the_shared_words_import_neither_torch_nor_megatron(by_module):
    modules = [module for module in by_module if part(module) in LIGHT]
    assert f"{PACKAGE}.planner.stage_search.search" in modules
    assert heavy_modules_after("\n".join(f"import {module}" for module in modules)) == set()


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_the_check_in_a_fresh_interpreter_can_fail(module):
    # Empty packages of these names: the real ones take seconds to import.
    code = f"import sys, types; sys.modules[{module!r}] = types.ModuleType({module!r})"
    assert heavy_modules_after(f"{code}\nimport {PACKAGE}") == {module}


def test_what_needs_no_torch_is_known(imported):
    assert {name for name in imported if not reached(name, imported) & HEAVY} == LIGHT


@pytest.mark.parametrize("name", sorted(SHARED))
def test_shared_words_know_no_part(name, imported):
    assert reached(name, imported) & set(imported) <= SHARED


def test_the_planner_knows_shared_words_only(imported):
    assert imported["planner"] & set(imported) <= SHARED | {"planner"}


@pytest.mark.parametrize("start", ["apply", "config"])
def test_applying_never_reaches_the_planners_search(start, by_module):
    search = {f"{PACKAGE}.planner.{name}" for name in ("planner", "plan", "policy_cost")}
    assert search & set(by_module) == search
    assert reached(f"{PACKAGE}.{start}", by_module) & search == set()


@pytest.mark.parametrize("target", ["integrations", "cli"])
def test_nothing_but_entry_points_imports_integrations_or_the_command_line(target, imported):
    importers = {name for name, names in imported.items() if target in names}
    assert importers <= ENTRIES | {target}


def test_the_reader_of_imports_sees_every_form():
    source = """
import torch.nn as nn
from megatron_autorecompute import compat, policy
from megatron_autorecompute.integrations.megatron_lm import main
def later():
    from megatron.core import parallel_state
"""
    found = {part(name) for name in imports(source)}
    assert found == {PACKAGE, "torch", "compat", "policy", "integrations", "megatron"}


def test_the_search_for_arrows_can_fail():
    imported = {"plan": {"solve"}, "solve": {"apply"}, "apply": {"torch", "plan"}}
    assert reached("plan", imported) & HEAVY == {"torch"}
    assert reached("apply", imported) & {"plan", "solve"} == {"plan", "solve"}
