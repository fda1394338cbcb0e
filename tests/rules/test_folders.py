"""Folders say who may know what. Every rule has a second test that shows that it can fail."""

import ast
import subprocess
import sys

import pytest

from tests.rules.imports import PACKAGE, ROOT, imports, part, sources

WORDS = {
    "block_names",
    "errors",
    "interrupts",
    "json_records",
    "lines",
    "megatron_fields",
    "options",
    "packages",
    "patched",
    "policy",
    "profile",
    "units",
    "work_order",
}
"""What every part may use."""
PUBLIC = {"apply", "config"}
"""Addresses that users import; nothing inside does."""
KNOWS = {
    "planner": set(),
    "report": {"planner"},
    "compat": {"planner"},
    "runtime": {"planner", "compat", "report"},
    "meta": {"planner", "compat", "runtime"},
    "one_device": {"planner", "compat", "runtime", "meta"},
    "compare": {"planner", "report", "compat", "runtime", "meta"},
    "integrations": {"planner", "compat", "runtime", "meta"},
    "cli": {"planner", "report", "meta", "one_device", "compare"},
    "pretrain": {"runtime", "integrations"},
    "bridge_pretrain": {"runtime", "integrations"},
    "__main__": {"cli"},
    "apply": {"runtime"},
    "config": {"runtime"},
    PACKAGE: {"planner", "runtime"},
}
"""Which folders a part may import, besides the words and itself."""
HEAVY = {"torch", "megatron"}
RUNS_MEGATRON = {
    *("compat", "runtime", "meta", "one_device", "compare", "integrations", "bridge_pretrain")
}


def strangers(name: str, source: str) -> set[str]:
    """The parts of the package that a module may not know and imports all the same."""
    parts = {part(found) for found in imports(source) if found.startswith(PACKAGE + ".")}
    folders = set(KNOWS) - {PACKAGE}
    return (parts & folders) - KNOWS.get(part(name), set()) - {part(name)}


def heavy_modules_after(code: str) -> set[str]:
    """Which of torch and megatron a fresh interpreter has imported once it ran `code`."""
    ask = f"{code}\nimport sys\nprint(*({HEAVY!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(ran.stdout.split())


def private_names(source: str) -> set[str]:
    """Names with a leading underscore that a source takes out of another module of the package."""
    tree = ast.parse(source)
    modules, taken = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
            modules |= {alias.asname or alias.name for alias in node.names}
            taken |= {alias.name for alias in node.names if _is_private(alias.name)}
    for node in ast.walk(tree):
        of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if of_name and node.value.id in modules and _is_private(node.attr):
            taken.add(f"{node.value.id}.{node.attr}")
    return taken


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    return sources()


def test_every_module_is_in_a_folder_or_is_a_word(modules):
    assert {part(name) for name in modules} == WORDS | set(KNOWS)


def test_folders_import_only_what_they_may_know(modules):
    assert {name: strangers(name, source) for name, source in modules.items()} == {
        name: set() for name in modules
    }


def test_an_arrow_that_is_not_allowed_is_found():
    source = "def later():\n    from megatron_autorecompute.meta.job import Job"
    assert strangers(f"{PACKAGE}.runtime.apply", source) == {"meta"}
    assert strangers(f"{PACKAGE}.policy", source) == {"meta"}
    assert strangers(f"{PACKAGE}.cli.estimate", source) == set()


FLOORS = ("planner.cost", "planner.search", "planner")
"""Of the planner, the lowest first: costs, the search, and plans with what is beside them."""


def floor(name: str) -> int | None:
    """Of a module of the planner; None of others."""
    inside = name.removeprefix(f"{PACKAGE}.") + "."
    return next((i for i, at in enumerate(FLOORS) if inside.startswith(f"{at}.")), None)


def from_above(name: str, source: str) -> set[str]:
    """What a module of the planner imports from a floor above its own."""
    own = floor(name)
    return {found for found in imports(source) if own is not None and (floor(found) or 0) > own}


def test_costs_know_no_search_and_the_search_no_plan(modules):
    assert set().union(*(from_above(*module) for module in modules.items())) == set()


def test_an_arrow_to_a_floor_above_is_found():
    source = f"from {PACKAGE}.planner.search.solve import solve"
    assert from_above(f"{PACKAGE}.planner.cost.layout", source)
    assert not from_above(f"{PACKAGE}.planner.plan", source)


def in_circles(knows: dict[str, set[str]]) -> set[str]:
    """Folders that know themselves by way of others."""
    return {folder for folder in knows if folder in reached(*knows[folder], imported=knows)}


def test_no_folders_know_each_other_in_a_circle():
    assert in_circles(KNOWS) == set()


def test_no_modules_of_the_planner_know_each_other_in_a_circle(modules):
    inside = {name for name in modules if floor(name) is not None}
    assert in_circles({name: imports(modules[name]) & inside - {name} for name in inside}) == set()


def test_a_circle_of_folders_is_found():
    knows = {"plan": set(), "show": {"plan", "run"}, "run": {"measure"}, "measure": {"show"}}
    assert in_circles({**knows, "start": {"run"}}) == {"show", "run", "measure"}


@pytest.mark.parametrize("light", [WORDS, {"planner"}, {"report"}, {"cli"}])
def test_what_shows_and_plans_is_imported_without_torch_and_megatron(light, modules):
    names = [name for name in modules if part(name) in light and not name.endswith("__main__")]
    assert heavy_modules_after("\n".join(f"import {name}" for name in names)) == set()


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_the_check_in_a_fresh_interpreter_can_fail(module):
    # Empty packages of these names: the real ones take seconds to import.
    code = f"import sys, types; sys.modules[{module!r}] = types.ModuleType({module!r})"
    assert heavy_modules_after(f"{code}\nimport {PACKAGE}") == {module}


def names_of_megatron(name: str, source: str) -> set[str]:
    """What a module that may not know Megatron imports of it."""
    if part(name) in RUNS_MEGATRON:
        return set()
    return {found for found in imports(source) if found.split(".")[0] == "megatron"}


def test_only_folders_that_run_megatron_import_it(modules):
    assert set().union(*(names_of_megatron(*module) for module in modules.items())) == set()


def test_an_import_of_megatron_in_the_planner_is_found():
    source = "from megatron.core import parallel_state"
    assert names_of_megatron(f"{PACKAGE}.planner.plan", source)
    assert not names_of_megatron(f"{PACKAGE}.compat.layers", source)


VARIES = {"datetime", "random", "secrets", "time"}
"""What gives other answers on the same machine: clocks and chance."""


def of_other_answers(source: str) -> set[str]:
    """What a source imports of these."""
    return {found for found in imports(source) if found.split(".")[0] in VARIES}


def test_the_planner_asks_neither_a_clock_nor_chance(modules):
    planner = {name: source for name, source in modules.items() if part(name) == "planner"}
    assert set().union(*map(of_other_answers, planner.values())) == set()
    assert not any("np.random" in source for source in planner.values())


def test_a_clock_in_the_planner_is_found():
    assert of_other_answers("def later():\n    from time import monotonic")


def versions_asked(source: str) -> set[str]:
    """Where a source asks which megatron-core there is, to do one thing or another.

    By its number, or by trying whether a name is there. Saying the number in a message is no
    question, nor is asking whether an object of Megatron's carries a mark of our own.
    """
    tree = ast.parse(source)
    megatrons = _names_of_megatrons(tree)
    asked = {ast.unparse(node) for node in ast.walk(tree) if _asks_version(node, megatrons)}
    return asked | {name for name in imports(source) if name.split(".")[0] == "packaging"}


def _names_of_megatrons(tree: ast.AST) -> set[str]:
    """Names that a source binds to Megatron's modules and what it imports out of them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "megatron":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] == "megatron"]
            names |= {alias.asname or "megatron" for alias in found}
        elif isinstance(node, ast.Assign) and '"megatron.' in ast.unparse(node).replace("'", '"'):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _asks_version(node: ast.AST, megatrons: set[str]) -> bool:
    if isinstance(node, ast.Compare | ast.Attribute | ast.Subscript):
        inside = {ast.unparse(part) for part in ast.walk(node) if part is not node}
        return bool(inside & {"versions.installed()", "megatron.core.__version__"})
    if isinstance(node, ast.Try):
        caught = {ast.unparse(handler.type) for handler in node.handlers if handler.type}
        tried = {name for line in node.body for name in imports(ast.unparse(line))}
        fails = bool(caught & {"ImportError", "ModuleNotFoundError"})
        return fails and any(map(_is_of_core, tried))
    if isinstance(node, ast.Call):
        return _looks_for_name(node, megatrons)
    return False


def _looks_for_name(call: ast.Call, megatrons: set[str]) -> bool:
    """hasattr and getattr on something of Megatron's, with a name written out; and find_spec."""
    function = ast.unparse(call.func).split(".")[-1]
    words = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
    if function == "find_spec":
        return any(map(_is_of_core, words))
    if function not in {"hasattr", "getattr"} or not isinstance(call.args[1], ast.Constant):
        return False
    asked_of = {name.id for name in ast.walk(call.args[0]) if isinstance(name, ast.Name)}
    return bool(asked_of & megatrons)


def _is_of_core(name: str) -> bool:
    return name.startswith("megatron.core")


def test_a_version_is_asked_only_in_compat(modules):
    asked = {
        name: versions_asked(source) for name, source in modules.items() if part(name) != "compat"
    }
    assert asked == {name: set() for name in asked}


@pytest.mark.parametrize(
    "asks",
    [
        "versions.installed() < Version('0.17')",
        "versions.installed().release",
        "megatron.core.__version__ >= '0.17'",
        "from packaging.version import Version",
        "from megatron.core import recompute\nhasattr(recompute, 'checkpointed_forward')",
        "import megatron.core\ngetattr(megatron.core.recompute, 'run', None)",
        "utils = _module('megatron.core.utils')\nhasattr(utils, 'name')",
        "util.find_spec('megatron.core.recompute')",
        "try:\n    from megatron.core import recompute\nexcept ImportError:\n    recompute = None",
    ],
)
def test_a_version_that_is_asked_is_found(asks):
    assert versions_asked(asks)


@pytest.mark.parametrize(
    "says",
    [
        "versions.installed()\nf'megatron-core {versions.installed()} does not'",
        "import megatron.core\nfound = {'megatron-core': megatron.core.__version__}",
        "from megatron.training import training\nhasattr(training.train, _MARK)",
        "util.find_spec('megatron.training')",
        "getattr(config, 'fp8', None)",
    ],
)
def test_what_does_not_branch_on_a_version_is_let_be(says):
    assert not versions_asked(says)


@pytest.mark.parametrize("start", ["apply", "config_field"])
def test_applying_never_reaches_the_planners_search(start, modules):
    search = {f"{PACKAGE}.planner.{name}" for name in ("search.solve", "plan", "cost.policy_cost")}
    imported = {name: imports(source) & set(modules) for name, source in modules.items()}
    del imported[PACKAGE]  # whose names are looked up when they are asked for
    assert search <= set(modules)
    assert reached(f"{PACKAGE}.runtime.{start}", imported=imported) & search == set()


def reached(*starts: str, imported: dict[str, set[str]]) -> set[str]:
    """All that importing `starts` can import, themselves included."""
    seen: set[str] = set()
    waiting = set(starts)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= imported.get(name, set()) - seen
    return seen


def test_the_search_for_arrows_can_fail():
    imported = {"plan": {"solve"}, "solve": {"apply"}, "apply": {"torch", "plan"}}
    assert reached("plan", imported=imported) == {"plan", "solve", "apply", "torch"}


def of_the_planner(source: str) -> set[str]:
    """Modules of the planner, and tests that may import them, that a source imports."""
    return {found for found in imports(source) if found.startswith((f"{PACKAGE}.planner", "tests"))}


def test_the_planners_oracle_shares_no_code_with_it(modules):
    oracle = (ROOT / "tests/planner/definitions.py").read_text()
    assert of_the_planner(oracle) == set()
    words = [name for name in modules if name in imports(oracle) and name != PACKAGE]
    assert not any(of_the_planner(modules[name]) for name in words)


def test_an_oracle_that_asks_the_planner_is_found():
    assert of_the_planner(f"from {PACKAGE}.planner.cost.schedule import Schedule")
    assert of_the_planner("from tests.planner import random_profiles")


def test_integrations_do_not_know_each_other(modules):
    folder = f"{PACKAGE}.integrations."
    for name, source in modules.items():
        if name.startswith(folder):
            others = {found for found in imports(source) if found.startswith(folder)}
            assert not {found for found in others if not found.startswith(name)}, name


def test_no_module_takes_anothers_private_names(modules):
    assert set().union(*map(private_names, modules.values())) == set()


def test_a_private_name_that_is_taken_is_found():
    source = "from megatron_autorecompute.runtime import probe\n"
    assert private_names(source + "probe._now()") == {"probe._now"}
    assert private_names("from megatron_autorecompute.runtime.probe import _now") == {"_now"}
    assert private_names(source + "self._now(); probe.__name__") == set()


def mocks(source: str) -> bool:
    """Whether a source imports unittest."""
    return any(found.split(".")[0] == "unittest" for found in imports(source))


def test_mocks_are_for_tests(modules):
    scripts = [
        path for folder in ("benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [name for name, source in modules.items() if mocks(source)] == []
    assert [path.name for path in scripts if mocks(path.read_text())] == []


def test_a_mock_is_found():
    assert mocks("def later():\n    from unittest import mock")


BESIDE = {
    "testing": set(),
    "examples": set(),
    "scripts": {"testing"},
    "benchmarks": {"testing", "examples", "scripts"},
    "tests": {"testing", "examples", "scripts", "benchmarks"},
}
"""Folders beside the package, which all may know, and which others each may import."""


def taken_from_beside(folder: str, source: str) -> set[str]:
    """The folders beside the package that a source of one of them may not know and imports."""
    return ({part(found) for found in imports(source)} & set(BESIDE)) - BESIDE[folder] - {folder}


def test_tests_know_benchmarks_and_scripts_and_not_the_other_way_round():
    found = {
        str(path.relative_to(ROOT)): taken_from_beside(folder, path.read_text())
        for folder in BESIDE
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: taken for path, taken in found.items() if taken} == {}


def test_a_benchmark_that_imports_a_test_is_found():
    source = "def main():\n    from tests.support import one_step\n    import scripts.settings"
    assert taken_from_beside("benchmarks", source) == {"tests"}
    assert taken_from_beside("scripts", source) == {"tests"}
    assert taken_from_beside("tests", source) == set()
