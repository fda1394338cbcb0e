"""Host memory that this process may still take: its node's, and what its containers leave of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/")) -> int:
    """The least of what Linux says is available and what every control group above us leaves.

    Args:
        root: where `proc` and `sys` lie.

    A page cache that nobody uses counts as free, in groups as in `MemAvailable`. Files and their
    meaning: proc_meminfo(5); the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    return max(0, min([_available(root), *_left_by_groups(root)]))


def machine_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) << 10


def _left_by_groups(root: Path) -> Iterator[int]:
    ours = root / "proc/self/cgroup"
    for line in ours.read_text().splitlines() if ours.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", "inactive_file")
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            left = _left(mount / group, *files)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, current: str, inactive: str) -> int | None:
    """The memory that a folder leaves; None if it limits nothing or a namespace hides it."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / current).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if most == "max" else int(most) - used + int(stat.get(inactive, 0))
