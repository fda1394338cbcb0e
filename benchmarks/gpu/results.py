"""The one file all parts write to: results item by item, so that any part can be cut off and go on.

Pure Python: what a page is made from, and what a laptop can read. Bytes and milliseconds inside.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_autorecompute.errors import AutorecomputeError
from megatron_autorecompute.json_records import write_atomically

SCHEMA_VERSION = 1
OUTCOMES = ("passed", "failed", "skipped")
"""Of a test, the word before any reason."""


class BenchmarkError(AutorecomputeError):
    """Results cannot be read, belong to another machine or code, or are not all there."""

    exit_code = 12


class OutOfTimeError(AutorecomputeError):
    """A part's time is over before its next item; running it again goes on there."""

    exit_code = 11


@dataclass(slots=True)
class Section:
    """One part on one model."""

    part: int
    model: str
    """Name of the case; `plugin` where a part is not about one model."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """The whole training job, field by field."""
    items: dict[str, Any] = field(default_factory=dict)
    """What was measured, in the order measured."""
    complete: bool = False
    stopped: str = ""
    """Why it is not complete, as the process that ran it said last."""

    def configure(self, configuration: dict[str, Any]) -> None:
        """Say what is measured here.

        Raises: BenchmarkError when what is known was measured with another configuration.
        """
        configuration = json.loads(json.dumps(configuration))
        if self.items and self.configuration != configuration:
            raise BenchmarkError(
                f"Part {self.part} of {self.model} was begun with {self.configuration}; asked is "
                f"{configuration}. Figures of two configurations do not mix: give another --output."
            )
        self.configuration = configuration


@dataclass(slots=True)
class Results:
    """Everything measured on one machine with one set of versions."""

    path: Path
    machine: dict[str, str]
    """Device, driver, versions, this code's commit and the environment."""
    tiny: bool
    """Made by a dry run at a size that proves nothing."""
    date: str
    sections: dict[str, Section] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, machine: dict[str, str], *, tiny: bool) -> Results:
        """The file's results, to go on with; new ones where there is no file.

        Raises: BenchmarkError when the file is of another machine, other versions or code, or
            another size.
        """
        if not path.exists():
            return cls(path, machine, tiny, time.strftime("%Y-%m-%d"))
        found = cls.load(path)
        if (found.machine, found.tiny) != (machine, tiny):
            then, now = {**found.machine, "tiny": found.tiny}, {**machine, "tiny": tiny}
            differing = [k for k in {**then, **now} if then.get(k) != now.get(k)]
            raise BenchmarkError(
                f"{path} was measured with other "
                + "; ".join(f"{k}: {then.get(k)}, now {now.get(k)}" for k in differing)
                + ". Figures of two machines or codes do not mix: give another --output."
            )
        return found

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file.

        Raises: BenchmarkError when it cannot be read.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema_version"] != SCHEMA_VERSION:
                raise BenchmarkError(
                    f"{path} has schema_version {data['schema_version']}; this reads "
                    f"{SCHEMA_VERSION}. Use the version of the benchmarks that wrote it."
                )
            sections = {key: Section(**section) for key, section in data["sections"].items()}
            return cls(path, data["machine"], data["tiny"], data["date"], sections)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(
                f"Cannot read {path} as results of these benchmarks: {error!r}. Give the file that "
                "benchmarks.gpu.run wrote."
            ) from error

    def save(self) -> None:
        """Write atomically."""
        data = {
            "schema_version": SCHEMA_VERSION,
            "machine": self.machine,
            "tiny": self.tiny,
            "date": self.date,
            "sections": {key: asdict(section) for key, section in self.sections.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(json.dumps(data, indent=1) + "\n", self.path)

    def section(self, part: int, model: str) -> Section:
        """The section of one part and model, empty at first."""
        return self.sections.setdefault(key_of(part, model), Section(part, model))


def key_of(part: int, model: str) -> str:
    """How a section is called in the file and on the command line."""
    return f"{part}-{model}"


class Ledger:
    """What a part writes its items through: known ones are not made again.

    Args:
        results: the file.
        section: the part's place in it.
        seconds: how long the part may run; no item is begun later.
    """

    def __init__(self, results: Results, section: Section, seconds: float) -> None:
        self.results, self.section = results, section
        self._end = time.monotonic() + seconds

    def seconds_left(self) -> float:
        """How long the part may still run."""
        return self._end - time.monotonic()

    def item(self, name: str, make: Callable[[], Any]) -> Any:
        """The item of this name, made now if an earlier run has not.

        Raises: OutOfTimeError before an item that time is over for.
        """
        items = self.section.items
        if name not in items:
            self.check(name)
            print(f"  {name}", flush=True)
            self.note(name, make())
        return items[name]

    def check(self, name: str) -> None:
        """Raises OutOfTimeError when time is over before this item."""
        if self.seconds_left() <= 0:
            raise OutOfTimeError(f"Time is over before {name!r}; run the part again to go on.")

    def note(self, name: str, value: Any) -> None:
        """Write down an item that is there already."""
        self.section.items[name] = value
        self.results.save()


def between(low_bytes: int, high_bytes: int, fraction: float) -> int:
    """The byte count that stands `fraction` of the way from low to high."""
    return round(low_bytes + fraction * (high_bytes - low_bytes))


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of every pair of steps that ran next to each other."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
