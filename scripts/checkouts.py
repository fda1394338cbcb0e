"""The commits of the checkouts that a page was read from."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping
from pathlib import Path

PACKAGES = {"Megatron Bridge": "megatron.bridge", "Megatron-LM": "megatron.core"}


def read_from(packages: Mapping[str, str] = PACKAGES) -> str:
    """A sentence with the commit and day of each checkout, for a page; empty if one is not known.

    Args:
        packages: names of projects, and of a package in the checkout of each.
    """
    found = {name: commit(_folder(package)) for name, package in packages.items()}
    if not all(found.values()):
        return ""
    return f"Read from {' and '.join(f'{name} {one}' for name, one in found.items())}."


def commit(folder: Path | None) -> str:
    """Commit and day of the checkout that a folder belongs to; empty if it belongs to none, as
    packages that were installed inside one."""
    if folder is None or not _git(folder, "ls-files", "--error-unmatch", "."):
        return ""
    return _git(folder, "log", "-1", "--format=%h of %cs")


def _folder(package: str) -> Path | None:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def _git(folder: Path, *words: str) -> str:
    asked = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
