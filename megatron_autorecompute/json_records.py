"""Reads and writes records as JSON files: the schema is checked, and writing is atomic.

pydantic validates, because it reports the path and the value of every bad field. The records are
plain frozen dataclasses; only this module and their field constraints use pydantic.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megatron_autorecompute.errors import AutorecomputeError, ProfileError

Record = TypeVar("Record")


def to_json(record: Any) -> str:
    """Indented JSON of a dataclass record, checked by reading it back.

    Raises: ProfileError when the record would not pass the schema it is written under.
    """
    text = json.dumps(asdict(record), indent=1) + "\n"
    from_json(type(record), text, source=f"this {type(record).__name__}")
    return text


def from_json(
    record_type: type[Record], text: str, *, source: str, major: int = 1, field: str = ""
) -> Record:
    """Read one record. Unknown fields are ignored: a newer minor version wrote them.

    Args:
        record_type: a dataclass.
        text: JSON.
        source: what error messages call the text, such as its path.
        major: the newest schema_version that can be read.
        field: the text may also be a larger record that has this one in the named field.

    Raises:
        ProfileError: a bad field, named by its path, or a schema_version above `major`.
    """
    try:
        data = json.loads(text)
        if isinstance(data, dict) and field in data:
            data, source = data[field], f"{field} in {source}"
            text = json.dumps(data)
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{source} is not whole JSON ({error}). Write it again; a cut-off file cannot be used."
        ) from error
    _refuse_newer(data, source, major)
    try:
        return TypeAdapter(record_type).validate_json(text, strict=True)
    except ValidationError as error:
        lines = "\n".join(f"  {_describe(item)}" for item in error.errors(include_url=False))
        raise ProfileError(
            f"{source} does not fit the {record_type.__name__} schema. Correct:\n{lines}"
        ) from error
    except AutorecomputeError as error:  # a part that refuses itself, such as a layout
        raise ProfileError(f"{source}: {error}") from error


def load(record_type: type[Record], path: str | Path, *, major: int = 1, field: str = "") -> Record:
    """Read one record from a file; see `from_json`.

    Raises: ProfileError when it cannot be read or does not fit the schema.
    """
    text = read(path, record_type.__name__)
    return from_json(record_type, text, source=str(path), major=major, field=field)


def read(path: str | Path, what: str) -> str:
    """The text of a file; raises ProfileError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"Cannot read {path}: {error}. Give the path of a {what} JSON file."
        ) from error


def has_fields(text: str, *names: str) -> bool:
    """Whether a text is a JSON object with fields of these names."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.keys() >= set(names)


def digest(data: Any) -> str:
    """SHA-256 of plain JSON data, independent of key order and whitespace."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def save(record: Any, path: str | Path) -> None:
    """Write the record atomically: readers see the old file or the whole new one, never a part.

    Raises: ProfileError when the record is invalid or the folder cannot be written.
    """
    write_atomically(to_json(record), path)


def write_atomically(text: str, path: str | Path) -> None:
    """Write text to a temporary file beside `path`, flush it to the disk, then rename it.

    Raises: ProfileError when the folder cannot be written.
    """
    target = Path(path)
    if not target.name:
        raise ProfileError(f"Cannot write {str(path)!r}: it names no file. Give a writable path.")
    # Not tempfile: only the owner could read its files, but ranks of other users share a plan.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # the whole folder may be gone
            temporary.unlink()
        # Not str(error): it names the temporary file.
        reason = error.strerror or error
        raise ProfileError(f"Cannot write {target}: {reason}. Give a writable path.") from error


def _refuse_newer(data: Any, source: str, major: int) -> None:
    found = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(found, int) and found > major:
        raise ProfileError(
            f"{source} has schema_version {found}; this version reads up to {major}. "
            "Upgrade megatron-autorecompute or write the file again with this version."
        )


def _describe(item: Any) -> str:
    """One pydantic error as `kinds[1].choices[2].held_bytes: -3, must be ≥ 0`."""
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in item["loc"]).lstrip(".")
    if item["type"] == "missing":
        return f"{path}: missing, must be given"
    rule = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = rule.replace("greater than or equal to", "≥").replace("less than or equal to", "≤")
    found = item["input"]
    shown = f"{found!r}, " if isinstance(found, (str, int, float, bool, type(None))) else ""
    return f"{path or 'the file'}: {shown}{rule}"
