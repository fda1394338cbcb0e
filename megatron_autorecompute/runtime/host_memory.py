"""Host memory that this process may still take: its node's, and what its containers leave of it."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/")) -> int:
    """The least of what Linux says is available and what every control group (v2) above us leaves.

    root: where `proc` and `sys` lie.

    A page cache that nobody uses counts as free, in groups as in `MemAvailable`.
    """
    words = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = [int(words["MemAvailable"].split()[0]) << 10]
    ours = root / "proc/self/cgroup"
    for line in ours.read_text().splitlines() if ours.exists() else ():
        if line.startswith("0::"):
            own = PurePosixPath(line.removeprefix("0::/"))
            for group in (own, *own.parents):
                free += _left(root / "sys/fs/cgroup" / group)
    return max(0, min(free))


def machine_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left(group: Path) -> list[int]:
    """The memory that a group leaves; nothing if it limits nothing or a namespace hides it."""
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    return [] if most == "max" else [int(most) - used + int(stat["inactive_file"])]
