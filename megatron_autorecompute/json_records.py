"""Reads and writes records as JSON files: the schema is checked, and writing is atomic.

pydantic validates, because it reports the path and the value of every bad field. The records are
plain frozen dataclasses; only this module and their field constraints use pydantic.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megatron_autorecompute.errors import AutorecomputeError, OptionError, ProfileError

Record = TypeVar("Record")
MOST_BYTES = 1 << 30
"""The largest file that is read. A larger one is no profile or plan, but say /dev/zero."""
UTF_8 = "utf-8-sig"
"""How files are read: Windows' editors write a mark of three bytes before the text."""
MOST_LINES = 8
"""The most lines of a list of what to correct in a file."""
MOST_SHOWN = 80
"""Characters of a bad value that an error message repeats."""


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

    Raises ProfileError: a bad field, named by its path, or a schema_version above `major`.
    """
    what = record_type.__name__
    try:
        data = json.loads(text)
        if isinstance(data, dict) and field in data:
            data, source = data[field], f"{field} in {source}"
            text = json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProfileError(
            f"{source} is not whole JSON, as a {what} is: {error}. Write it again. A job in YAML "
            "becomes a Profile by megatron-autorecompute estimate."
        ) from error
    _refuse_newer(data, source, major)
    try:
        return TypeAdapter(record_type).validate_json(text, strict=True)
    except ValidationError as error:
        wrong = corrections(map(described, error.errors(include_url=False)))
        raise ProfileError(f"{source} does not fit the {what} schema. {wrong}") from error
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
        return read_text(path)
    except (OSError, TypeError, ValueError) as error:
        raise ProfileError(
            f"Cannot read {named(path)}: {reason(error)}. Give the path of a {what} JSON file."
        ) from error


def read_text(path: str | Path) -> str:
    """The text of a file; raises OSError or ValueError when it cannot be, or is too long."""
    with open(os.fspath(path), "rb") as file:  # no number: it would be a descriptor
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode(UTF_8)
    except UnicodeDecodeError as error:
        raise ValueError("it is no UTF-8 text") from error


def named(path: str | Path) -> str:
    """A path as a sentence has it: quotes where it is empty."""
    return str(path) or repr("")


def reason(error: Exception) -> str:
    """Why a file cannot be read or written, without its name."""
    return str(getattr(error, "strerror", None) or error)


def has_fields(text: str, *names: str) -> bool:
    """Whether a text is a JSON object with fields of these names."""
    try:
        data = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.keys() >= set(names)


def digest(data: Any) -> str:
    """SHA-256 of plain JSON data, independent of key order and whitespace."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(content: str | bytes, path: str | Path) -> None:
    """Write to a temporary file beside `path`, flush it to the disk, then rename it.

    A link stays, and what it points to is written. A device or a FIFO is refused.

    Raises: ProfileError when it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    with _said_why(path):
        target = _target(path)
        temporary = _beside(target)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError:
            with contextlib.suppress(OSError):  # the whole folder may be gone
                temporary.unlink()
            raise


def check_writable(path: str | Path, reads: Iterable[str | Path] = ()) -> None:
    """Raise ProfileError if `write_atomically` cannot write a file here, tried with an empty one.

    Raises OptionError as `check_other` does.
    """
    check_other(path, reads)
    with _said_why(path):
        probe = _beside(_target(path))
        probe.touch(exist_ok=False)
        probe.unlink()


def check_other(path: str | Path, reads: Iterable[str | Path]) -> None:
    """Raise OptionError if a file to write is also a file to read, under any name."""
    for read in reads:
        with contextlib.suppress(OSError, ValueError):  # one of them is not there
            if os.path.samefile(path, read):
                raise OptionError(
                    f"The output {path} is the input {read}, and would replace it. Give the output "
                    "another name."
                )


def _beside(target: Path) -> Path:
    # Not tempfile: only the owner could read its files, but ranks of other users share a plan.
    return target.with_name(f".{target.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}")


def _target(path: str | Path) -> Path:
    """The file to replace, links followed."""
    if not Path(path).name:
        raise ValueError("it names no file")
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        if not stat.S_ISREG(mode):
            raise ValueError("it is no regular file")
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _said_why(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        # Not str(error) of an OSError: it names the temporary file.
        raise ProfileError(
            f"Cannot write {named(path)}: {reason(error)}. Give a writable path."
        ) from error


def _refuse_newer(data: Any, source: str, major: int) -> None:
    found = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(found, int) and found > major:
        raise ProfileError(
            f"{source} has schema_version {found}; this version reads up to {major}. "
            "Upgrade megatron-autorecompute or write the file again with this version."
        )


def corrections(wrong: Iterable[str]) -> str:
    """The end of a message about a file: what to correct, a line each, and how many more."""
    lines = list(wrong)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more like these"]
    return "\n".join(["Correct:", *(f"  {line}" for line in lines)])


def described(item: Any) -> str:
    """One pydantic error as `kinds[1].choices[2].held_bytes: -3, must be ≥ 0`."""
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{shown_name(p)}" for p in item["loc"])
    path = path.lstrip(".")
    if item["type"] == "missing":
        return f"{path}: missing, must be given"
    rule = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = rule.replace("greater than or equal to", "≥").replace("less than or equal to", "≤")
    found = item["input"]
    plain = isinstance(found, (str, int, float, bool, type(None)))
    shown = f"{_short(found)}, " if plain and item["type"] != "json_invalid" else ""
    return f"{path or 'the file'}: {shown}{rule}"


def shown_name(name: str) -> str:
    """A name from a file for a line of a message: quoted where it is more than one word."""
    return name if name.isprintable() and len(name) <= MOST_SHOWN else _short(name)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number too long to print"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
