#!/usr/bin/env python3
"""Write what pages in docs/ take from the code: fields of files, commands and exit codes.

A marker is `<!-- fields: MODULE.CLASS PREFIX=MODULE.CLASS ... -->`, `<!-- commands -->` or
`<!-- exit codes -->`; its table ends at `<!-- end of reference -->`. A field's meaning is its
docstring in the source, its name begins with the prefix.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron_autorecompute import errors  # noqa: E402
from megatron_autorecompute.cli.program import COMMANDS  # noqa: E402
from scripts.tables import markdown  # noqa: E402

PAGES = sorted(ROOT.glob("docs/**/*.md"))
MARKED = re.compile(
    r"(<!-- (fields|commands|exit codes)(?:: ([^>]+))? -->\n).*?(<!-- end of reference -->)",
    re.DOTALL,
)
TYPES = {
    "Bytes": "bytes",
    "BudgetBytes": "bytes",
    "SignedBytes": "bytes, signed",
    "Milliseconds": "ms",
    "StepMilliseconds": "ms",
    "SignedMilliseconds": "ms, signed",
    "Positive": "count",
    "Count": "count",
    "Ranks": "count",
    "Index": "index",
    "Coefficient": "number",
    "Rate": "number",
    "Factor": "number",
    "Share": "0 to 1",
    "Percentile": "0 to 100",
    "Percent": "0 to 100",
    "Tokens": "tokens",
    "Uneven": "number from 1",
    "Version": "count",
    "Choice": "choice",
    "Dtype": "dtype",
    "Any": "anything",
    "str": "text",
    "int": "whole number",
    "float": "number",
}
"""What the code's names for types are called in the tables."""


def updated(page: str) -> str:
    """The text with every marked table as the code has it now."""
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3])}{m[4]}", page)


def _fields(classes: str) -> str:
    rows = (row for each in classes.split() for row in _fields_of(*each.rpartition("=")[::2]))
    return markdown(("field", "type", "default", "meaning"), rows)


def _fields_of(prefix: str, path: str) -> Iterator[list[str]]:
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(f"megatron_autorecompute.{module}"), name)
    said = {each.name: each for each in dataclasses.fields(cls)}
    for field, kind, meaning in _documented(cls):
        if field in said:
            yield [f"`{prefix}{field}`", kind, _default(said[field]), meaning]


def _documented(cls: type) -> Iterator[tuple[str, str, str]]:
    """Name, type in words and docstring of every field, in the order of the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            text = after.value.value if isinstance(after, ast.Expr) else ""
            text = re.sub(r"(?<![:=])\b(None|True|False)\b", lambda m: JSON_NAMES[m[1]], text)
            yield node.target.id, _type(node.annotation), " ".join(text.split())


JSON_NAMES = {"None": "null", "True": "true", "False": "false"}


def _type(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            return f"{_type(left)} or {_type(right)}"
        case ast.Constant(None):
            return "null"
        case ast.Subscript(ast.Name("Literal"), values):
            return ", ".join(f"`{value.value}`" for value in _parts(values))
        case ast.Subscript(ast.Name("tuple" | "list" | "Annotated" as of), values):
            inner = _type(_parts(values)[0])
            return inner if of == "Annotated" else f"list of {inner}"
        case ast.Subscript(ast.Name("dict" | "Mapping"), values):
            key, value = map(_type, _parts(values))
            return f"{key} → {value}"
        case ast.Name(name):
            return TYPES.get(name, name)
    raise TypeError(f"{ast.unparse(node)}: no words for such a type; add them to {__file__}.")


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _shown(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else _shown(field.default)


def _shown(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return ""
    return f"`{json.dumps(value)}`" if value or isinstance(value, int | float) else _empty(value)


def _empty(value: object) -> str:
    return "null" if value is None else "empty"


def _commands(_: str) -> str:
    return markdown(("command", "does"), ([f"`{name}`", text] for name, text in COMMANDS.items()))


def _exit_codes(_: str) -> str:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    rows = ([c.exit_code, f"`{c.__name__}`", " ".join(inspect.getdoc(c).split())] for c in classes)
    return markdown(("code", "class", "meaning"), sorted(rows))


TABLES: dict[str, Callable[[str], str]] = {
    "fields": _fields,
    "commands": _commands,
    "exit codes": _exit_codes,
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
