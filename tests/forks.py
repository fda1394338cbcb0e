"""Many small jobs from one start of Python, as imports take most of a small job's time.

A module that `python -m` runs imports what its jobs need and serves them:

    if __name__ == "__main__":
        serve(import_everything, main)     # main(job) runs in every rank

A test starts it once and has it run one job after another, or several at the same time:

    with Forks("tests.pretrain.many", environment) as forks:
        ended = forks.run({"ranks": 2, ...}, timeout_s=60)[0]

Each rank is a fork of that process, with the environment torchrun would give it.
"""

import atexit
import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEMORY_BYTES = 16 << 30
LIMITED = ("sh", "-c", f'ulimit -v {MEMORY_BYTES >> 10} && exec "$@"', "sh")
"""Goes before a command. Not `preexec_fn`: that runs Python in a fork, which may wait for ever for
a lock that another thread of this process held, and no timeout of `subprocess` covers it."""
NEIGHBOURS_LIVE_S = 15
"""How long other ranks may go on after one has failed; torchrun ends them at once."""
PORTS = range(20_000, 32_000)
"""Below those that systems give to connections, of which another job's may take one before this job
listens on it."""


@dataclass(frozen=True)
class Ended:
    """A job's exit codes by rank, a signal as its negative number, and what its ranks printed."""

    codes: list[int]
    text: str


class Forks:
    """A process that has imported what jobs need, and runs them in forks of itself."""

    def __init__(self, module: str, environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [*LIMITED, sys.executable, "-W", "ignore", "-m", module],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        self._process.__enter__()
        return self

    def __exit__(self, *raised):
        self._process.__exit__(*raised)  # its stdin is closed, and so it ends

    def run(self, *jobs: Mapping[str, Any], timeout_s: float = 240) -> list[Ended]:
        """Run jobs at the same time, each on its "ranks" many ranks, and wait for all of them."""
        print(json.dumps({"jobs": jobs, "timeout_s": timeout_s}), file=self._process.stdin)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks has ended with {self._process.wait()}"
        return [Ended(**each) for each in json.loads(answer)]


def serve(prepare: Callable[[], None], main: Callable[[dict[str, Any]], None]) -> None:
    """Prepare, then run the jobs of every line of stdin until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    prepare()
    gc.collect()
    gc.freeze()  # what was imported need not be looked through, and copied, in every rank
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(_ended(main, told["jobs"], told["timeout_s"])), file=answers, flush=True)


def _ended(main, jobs: Sequence[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in jobs]
        codes = _codes(main, jobs, [log.fileno() for log in logs], timeout_s)
        for log in logs:
            log.seek(0)
        return [
            {"codes": [by_rank[rank] for rank in sorted(by_rank)], "text": log.read()}
            for by_rank, log in zip(codes, logs, strict=True)
        ]


def _codes(main, jobs: Sequence[dict[str, Any]], logs: Sequence[int], timeout_s: float):
    """Exit codes by rank, of every job."""
    running = {}
    for number, job in enumerate(jobs):
        port = free_port()  # now: one found before other jobs ran may be taken
        for rank in range(job["ranks"]):
            running[_start(main, job, rank, port, logs[number])] = number, rank
    codes: list[dict[int, int]] = [{} for _ in jobs]
    deadlines = [time.monotonic() + timeout_s] * len(jobs)
    while running:
        time.sleep(0.02)
        for process, (number, rank) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del running[process]
                codes[number][rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadlines[number]:
                os.kill(process, signal.SIGKILL)
            if any(codes[number].values()):
                neighbours_until = time.monotonic() + NEIGHBOURS_LIVE_S
                deadlines[number] = min(deadlines[number], neighbours_until)
    return codes


def _start(main, job: dict[str, Any], rank: int, port: int, log: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    atexit._clear()  # at its end this process does what it asks for itself
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        main(job)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    """One of `PORTS` that nobody listens on now."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", random.SystemRandom().choice(PORTS)))
            return probe.getsockname()[1]
