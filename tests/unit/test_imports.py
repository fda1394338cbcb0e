"""Importing changes nothing, the planner half needs no torch, and imports point one way only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_autorecompute"
HEAVY = {"torch", "megatron"}
PLANNER = (
    "alternatives",
    "auto_options",
    "auto_text",
    "boundary",
    "cli",
    "comparison",
    "cost_model",
    "errors",
    "native",
    "options",
    "pipeline",
    "plan",
    "policy",
    "profile",
    "rearrange",
    "records",
    "solve",
    "stage_search",
    "terminal",
)
SOLVER = {"solve", "cost_model", "plan"}
ENTRIES = {"pretrain", "__main__"}  # what `python -m` starts


def heavy_modules_after(code: str) -> set[str]:
    """Which of torch and megatron a fresh interpreter has imported once it ran `code`."""
    ask = f"{code}\nimport sys\nprint(*({HEAVY!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(ran.stdout.split())


def imports(source: str, package: str = PACKAGE) -> set[str]:
    """All that a source imports, in functions too: `name` of ours, else the outermost package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {f"{package}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not followed here"
            found.add(node.module or "")
    return {
        name.split(".")[1] if name.startswith(f"{package}.") else name.split(".")[0]
        for name in found
    }


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
def imported() -> dict[str, set[str]]:
    """What each module of the package imports, by its name within the package."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        name = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        found[name] = found.get(name, set()) | imports(path.read_text())
    return found


def test_the_planner_half_imports_neither_torch_nor_megatron():
    lines = [f"import {PACKAGE}.{module}" for module in PLANNER]
    assert heavy_modules_after("\n".join([f"import {PACKAGE}", *lines])) == set()


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_the_check_in_a_fresh_interpreter_can_fail(module):
    # Empty packages of these names: the real ones take seconds to import.
    code = f"import sys, types; sys.modules[{module!r}] = types.ModuleType({module!r})"
    assert heavy_modules_after(f"{code}\nimport {PACKAGE}") == {module}


@pytest.mark.parametrize("module", PLANNER)
def test_the_planner_half_never_reaches_the_runtime_half(module, imported):
    assert reached(module, imported) & HEAVY == set()


def test_every_module_without_torch_is_listed_as_planner_half(imported):
    light = {name for name in imported if not reached(name, imported) & HEAVY}
    assert light == {*PLANNER, "__init__", "report"}  # report draws what others measured


def test_applying_never_reaches_the_solver(imported):
    assert reached("apply", imported) & SOLVER == set()


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
    assert imports(source) == {"torch", "compat", "policy", "integrations", "megatron"}


def test_the_search_for_arrows_can_fail():
    imported = {"plan": {"solve"}, "solve": {"apply"}, "apply": {"torch", "plan"}}
    assert reached("plan", imported) & HEAVY == {"torch"}
    assert reached("apply", imported) & SOLVER == {"plan", "solve"}
