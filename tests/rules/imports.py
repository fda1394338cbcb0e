"""What each module of the package imports, read from its source."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_autorecompute"


@functools.cache
def imports(source: str) -> frozenset[str]:
    """All that a source imports, in functions too: full names, a name out of a module included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not followed here"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def part(name: str) -> str:
    """The folder or module of the package that a name is in; of others their outermost name."""
    words = name.split(".")
    return words[1] if words[0] == PACKAGE and len(words) > 1 else words[0]


def sources() -> dict[str, str]:
    """The source of every module of the package, by full name."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        words = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(words).removesuffix(".__init__")] = path.read_text()
    return found
