"""Ends the processes that a program started whenever the program ends.

Ctrl-C, which a terminal sends to a whole group of processes, reaches only the program itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Makes SIGINT wait until the block ends; processes that start in the block never see it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # with the first process it starts, and lets SIGINT through
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def end_with_parent() -> None:
    """End this process of multiprocessing as soon as its parent is gone. A SIGTERM, a SIGHUP or a
    `kill -9` leaves the parent no time to end others."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_behind, args=(parent.sentinel,), daemon=True).start()


def _exit_behind(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
