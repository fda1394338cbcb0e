"""Tests ask what is public. Every rule has a second test that shows that it can fail."""

import ast
import re

import pytest

from tests.rules.imports import PACKAGE, ROOT, sources

OURS = (PACKAGE, "benchmarks", "scripts", "examples")
"""What a test may take no `_name` of."""
OTHERS = {
    "_C",
    "_batched_p2p_ops",
    "_cdata",
    "_checkpointed_forward",
    "_clear",
    "_communicate",
    "_current_graph_task_id",
    "_deepcopy_dispatch",
    "_dump_snapshot",
    "_exit",
    "_get_normalization_func",
    "_get_sample_arguments",
    "_get_share_storage",
    "_modules",
    "_p2p_ops",
    "_record_memory_history",
    "_run_exitfuncs",
    "_schema",
    "_sleep",
}
"""Names of Python, torch, TE and Megatron that tests take: no source says whose an attribute is."""
BY_NAME = {"attrgetter", "delattr", "get", "getattr", "hasattr", "methodcaller", "object", "patch"}
BY_NAME |= {"multiple", "pop", "setattr", "setitem"}
"""Last words of functions that are given an attribute's name as text."""


def private_names(source: str) -> set[str]:
    """Names with a leading underscore that a source takes of something else than `self`.

    As an attribute, an import, a name given as text, or in a program that is text itself.
    """
    tree = ast.parse(source)
    found = set().union(*map(_taken, ast.walk(tree)))
    programs = (node.value for node in ast.walk(tree) if _is_text(node) and "import" in node.value)
    return {name for name in found if _is_private(name)}.union(*map(_in_program, programs))


def _taken(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute):
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return set() if of_self else {node.attr}
    if isinstance(node, ast.ImportFrom):
        modules = [f"{node.module}.{alias.name}" for alias in node.names]
        return set().union(*map(_of_ours, modules))
    if isinstance(node, ast.Import):
        return set().union(*(_of_ours(alias.name) for alias in node.names))
    if isinstance(node, ast.Subscript):
        return {node.slice.value} if _is_text(node.slice) else set()
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
        texts = {arg.value for arg in node.args if _is_text(arg)}
        return texts | {keyword.arg or "" for keyword in node.keywords}
    return _of_ours(node.value) if _is_text(node) else set()


def _of_ours(path: str) -> set[str]:
    """The names in a dotted path that begins in what is ours."""
    first, *names = path.split(".")
    return set(names) if first in OURS else set()


def _in_program(text: str) -> set[str]:
    try:
        ast.parse(text)
    except SyntaxError:
        return set()
    return private_names(text)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


@pytest.fixture(scope="module")
def tests() -> dict[str, str]:
    """The source of every test by path; rules look for names and paths as text."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    return {str(path): (ROOT / path).read_text() for path in paths if path.parts[1] != "rules"}


def test_no_test_takes_a_private_name(tests):
    assert {path: private_names(source) - OTHERS for path, source in tests.items()} == {
        path: set() for path in tests
    }


def test_every_name_of_others_is_taken_by_some_test(tests):
    assert set().union(*map(private_names, tests.values())) == OTHERS


@pytest.mark.parametrize(
    "takes",
    [
        "measurement._seen.clear()",
        "job()._seen",
        "super()._seen(1)",
        "workload._seen = None",
        "from megatron_autorecompute.runtime.probe import _seen",
        "from scripts.bridge_pretrain import main, _seen as seen",
        "import benchmarks._seen.run",
        "def test():\n    from benchmarks.gpu import _seen",
        "monkeypatch.setattr(pretrain, '_seen', None)",
        "monkeypatch.setattr('megatron_autorecompute.runtime.apply._seen', None)",
        "mock.patch('benchmarks.gpu.run._seen')",
        "mock.patch.object(run, '_seen')",
        "mock.patch.multiple(run, _seen=None)",
        "getattr(run, '_seen', None)",
        "operator.attrgetter('_seen')(run)",
        "vars(run)['_seen']",
        "run.__dict__.get('_seen')",
        "PROGRAM = 'from benchmarks.gpu import run\\nrun._seen()'",
    ],
)
def test_a_private_name_that_a_test_takes_is_found(takes):
    assert private_names(takes) == {"_seen"}


@pytest.mark.parametrize(
    "says",
    [
        "self._seen = cls._seen",
        "def _seen(): ...\n_seen()",
        "run.__name__",
        "name.endswith('_seen')",
        "from megatron.bridge.recipes.common import _seen",
        "import megatron_autorecompute.runtime.probe as _seen",
        "_, __ = 'no program: import _seen', x[0]",
    ],
)
def test_what_is_nobody_elses_private_name_is_let_be(says):
    assert private_names(says) == set()


def named_files(source: str, files: set[str]) -> set[str]:
    """Which of these files a source names as text, documentation aside."""
    tree = ast.parse(source)
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node.value for node in ast.walk(tree) if _is_text(node) and node not in said]
    names = {name for text in texts for name in re.findall(r"\w+\.py\b", text)}
    return names & files


def test_no_test_knows_the_package_by_its_files(tests):
    files = {f"{name.split('.')[-1]}.py" for name in sources()}
    assert {path: named_files(source, files) for path, source in tests.items()} == {
        path: set() for path in tests
    }


def test_a_file_that_a_test_names_is_found():
    files = {"probe.py", "apply.py"}
    assert named_files("'''See probe.py.'''\nassert calls == {'apply.py:run': 3}", files) == {
        "apply.py"
    }
    assert named_files("assert f'{folder}/probe.py' in text", files) == {"probe.py"}
    assert named_files("run('tests/uneven_apply.py')", files) == set()
