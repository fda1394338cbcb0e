"""Processes that end when their time is over, with everything that they started.

What is left running on a GPU disturbs every time that is measured after it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.gpu.results import OutOfTimeError


@contextmanager
def group(
    command: Sequence[str], *, grace_s: float = 10.0, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own; what is left of the group is ended with the context.

    Args:
        command: what is run.
        grace_s: how long it may take to end by itself when asked to.
        options: for Popen.
    """
    with subprocess.Popen(command, start_new_session=True, text=True, **options) as process:
        try:
            yield process
        finally:
            end(process, grace_s)


def end(process: subprocess.Popen[str], grace_s: float) -> None:
    """Ask first: torchrun's workers are in groups of their own, which it ends itself."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        os.killpg(process.pid, signal.SIGKILL)


def lines(command: Sequence[str], seconds: float, **options: Any) -> Iterator[str]:
    """What a process prints, line by line, as it comes.

    Raises: OutOfTimeError when it had to be ended, after what it printed until then.
    """
    over = time.monotonic() + seconds
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with group(command, **options) as process:
        timer = threading.Timer(seconds, end, (process, 10.0))
        timer.start()
        try:
            yield from process.stdout or ()
        finally:
            timer.cancel()
    if time.monotonic() >= over:
        raise OutOfTimeError(
            f"{' '.join(command)[:200]} had {seconds:.0f} s and was ended; run the part again to "
            "go on."
        )
