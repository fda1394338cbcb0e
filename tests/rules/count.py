"""How files and folders of the package hang together: `python -m tests.rules.count`."""

import ast

from tests.rules.imports import PACKAGE, imports, part, sources

FOLDERS = (
    "planner",
    "report",
    "compat",
    "runtime",
    "meta",
    "compare",
    "integrations",
    "cli",
)


class _Run(ast.NodeTransformer):
    """Leaves what is imported when the module is: not for types alone, not within functions."""

    def visit_If(self, node):
        return ast.Pass() if "TYPE_CHECKING" in ast.unparse(node.test) else node

    def visit_FunctionDef(self, node):
        return ast.Pass()


def graph() -> dict[str, set[str]]:
    """What each file imports of the others; folders' `__init__` are left out."""
    found = sources()
    files = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return {
        name: imports(ast.unparse(_Run().visit(ast.parse(found[name])))) & files - {name}
        for name in sorted(files)
    }


def levels(arrows: dict[str, set[str]]) -> int:
    """Files on the longest way along the arrows."""
    known: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in known:
            known[name] = 1 + max((level(other) for other in arrows[name]), default=0)
        return known[name]

    return max(map(level, arrows))


def folder(name: str) -> str:
    """The folder of a file; all that is in none is `words`."""
    return part(name) if part(name) in FOLDERS else "words"


def main() -> None:
    """Print what a reader of CONTRIBUTING.md may ask."""
    arrows = graph()
    print(f"{PACKAGE}: {len(arrows)} files, {levels(arrows)} levels, ", end="")
    print(f"{sum(map(len, arrows.values()))} imports")
    print("| folder | files | levels | imports within | of words | of other folders |")
    for where in (*FOLDERS, "words"):
        own = {name: found for name, found in arrows.items() if folder(name) == where}
        within = {name: {other for other in own[name] if other in own} for name in own}
        pairs = [folder(other) for name in own for other in own[name] - within[name]]
        inside, words = sum(map(len, within.values())), pairs.count("words")
        print(f"| {where} | {len(own)} | {levels(within)} | {inside} | {words} | ", end="")
        print(f"{len(pairs) - words} |")


if __name__ == "__main__":
    main()
