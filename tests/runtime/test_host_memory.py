"""What of a node's memory is ours to take, read from files as Linux writes them."""

from pathlib import Path

import pytest

from megatron_autorecompute.runtime.host_memory import free_bytes

pytestmark = pytest.mark.any_version


def written(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       2000 kB\nMemFree:  5 kB\nMemAvailable:      1000 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_containers_it_is_what_linux_says(tmp_path):
    assert free_bytes(written(tmp_path, {})) == 1000 << 10


def test_this_machine_has_some():
    assert free_bytes() > 0


@pytest.mark.parametrize(("limit", "free"), [("max", 1000 << 10), ("500000", 500000 - 90000 + 7)])
def test_a_container_leaves_what_it_may_hold_less_what_it_holds(tmp_path, limit, free):
    files = {
        "proc/self/cgroup": "0::/slurm/job_1\n",
        "sys/fs/cgroup/slurm/job_1/memory.max": "max\n",
        "sys/fs/cgroup/slurm/job_1/memory.current": "80000\n",
        "sys/fs/cgroup/slurm/job_1/memory.stat": "anon 1\ninactive_file 5\n",
        "sys/fs/cgroup/slurm/memory.max": limit,
        "sys/fs/cgroup/slurm/memory.current": "90000\n",
        "sys/fs/cgroup/slurm/memory.stat": "anon 1\ninactive_file 7\n",
    }
    assert free_bytes(written(tmp_path, files)) == free
