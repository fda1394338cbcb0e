"""An interrupt, a signal, or the death of a process ends `verify`: it neither hangs nor leaves
anything."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.meta.meta_step import in_processes

pytestmark = pytest.mark.any_version

PROGRAM = """
import signal
from megatron_autorecompute.meta.meta_step import in_processes
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so does what it starts
print("ready", flush=True)
try:
    in_processes(exec, ["print('running', flush=True); import time; time.sleep(600)"] * 3)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.mark.parametrize("said", ["ready", "running"])
def test_one_interrupt_of_the_terminal_ends_all_processes(said):
    # As Ctrl-C does, to the whole process group: while processes start, or while a stage runs.
    with started(said) as ran:
        os.killpg(ran.pid, signal.SIGINT)
        _, err = ran.communicate(timeout=60)
        assert (ran.returncode, err) == (130, "")
        assert _empty(ran.pid)


@pytest.mark.parametrize(
    ("said", "by"),
    [("ready", signal.SIGHUP), ("running", signal.SIGKILL)],
)
def test_what_ends_the_first_process_ends_all_of_them(said, by):
    with started(said) as ran:
        os.kill(ran.pid, by)
        assert ran.wait(timeout=60) == -by
        assert _empty(ran.pid)


@contextmanager
def started(said):
    """The program, in a process group of its own, when it has said this."""
    ran = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with ran:
        try:
            while ran.stdout.readline().strip() != said:
                assert ran.poll() is None
            time.sleep(0.2)
            yield ran
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ran.pid, signal.SIGKILL)


def test_a_process_that_is_killed_is_an_error_of_the_machine():
    with pytest.raises(MachineError, match="ended from outside"):
        in_processes(exec, ["import os; os.kill(os.getpid(), 9)"])


def _empty(group, timeout_s=20):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
