"""Which machines ran Megatron's tests on H100, and how slow their hosts are.

Golden values do not say. But NVIDIA's own cluster runs all tests, and GitHub's runners those alone
whose scope begins with mr-github (Megatron-LM tests/test_utils/recipes): a commit that rewrote the
values of no other test has them from there. These runners are AWS's (`nvidia-ci-aws-gpu-x8` in
.github/workflows/cicd-main.yml).
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path

MACHINES = Path(__file__).parents[1] / "data" / "megatron_recording_machines.csv"
OWN, AWS = "NVIDIA's", "AWS's"
HOSTS = {"": 1.0, OWN: 1.0, AWS: 1.6}
"""Times the host's microseconds of devices.json, by `python -m benchmarks.measured.hosts`."""


@functools.cache
def machines() -> dict[str, str]:
    """By the commit that wrote golden values of tests on H100, whose machine they are from."""
    with open(MACHINES, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {r["recorded_with"]: AWS if r["on_github"] == r["h100_tests"] else OWN for r in rows}
