"""Many small training jobs from one start of Python, as imports take most of a small job's time.

Reads a JSON list of jobs on stdin, runs them one after another, each rank in a fork of this process
with the environment torchrun would give it, and writes one JSON line per job: the exit codes of its
ranks and what they printed. Nothing of Megatron is changed before the fork: every job goes
through the launcher, or through `without_us`, from its first line.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

from megatron_autorecompute.meta import without_cuda
from tests.pretrain.jobs import free_port

HERE = Path(__file__).parent
NEIGHBOURS_LIVE_S = 15
"""How long other ranks may go on after one has failed; torchrun ends them at once."""


class EventFile:
    """Stands in for torch.utils.tensorboard.SummaryWriter where tensorboard is not installed."""

    def __init__(self, log_dir, **_):
        os.makedirs(log_dir, exist_ok=True)
        self.path = Path(log_dir, "events.jsonl")

    def add_scalar(self, name, value, step, *_):
        with self.path.open("a") as file:
            print(json.dumps([name, float(value), step]), file=file)

    def add_image(self, name, image, global_step, dataformats):
        self._show([name, global_step, dataformats, *image.shape])

    def add_text(self, name, text, global_step):
        if name.startswith("recompute/"):  # Megatron itself writes its arguments
            self._show([name, global_step, text])

    def _show(self, shown):
        with self.path.with_name("shown.jsonl").open("a") as file:
            print(json.dumps(shown), file=file)

    def __getattr__(self, _):  # flush, close
        return lambda *args, **named: None


def import_everything():
    with without_cuda.activate(training=True):  # as megatron.training 0.19 needs on Python 3.11
        for name in ("megatron.training.training", "megatron_autorecompute.runtime.controller"):
            importlib.import_module(name)
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = EventFile
    sys.modules[writer.__name__] = writer


def codes_of(job, log):
    """Exit codes by rank; a signal as its negative number."""
    port = free_port()  # now: one found before other jobs ran may be taken
    ranks = {start(job, rank, port, log): rank for rank in range(job["ranks"])}
    codes, deadline = {}, time.monotonic() + job["timeout_s"]
    while len(codes) < len(ranks):
        time.sleep(0.02)
        for process in [process for process, rank in ranks.items() if rank not in codes]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[ranks[process]] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + NEIGHBOURS_LIVE_S)
    return [codes[rank] for rank in range(len(ranks))]


def start(job, rank, port, log):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(job):
    command = [job["script"], *job["flags"].split()]
    if job["before"] is not None:
        runpy.run_path(str(HERE / job["before"]))
    if job["with_us"]:
        from megatron_autorecompute import pretrain

        sys.argv = ["pretrain", *command, "--recompute-run-on-cpu"]
        pretrain.main()
    else:
        sys.argv = [str(HERE / "without_us.py"), *command]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    import_everything()
    for job in json.load(sys.stdin):
        with tempfile.TemporaryFile("w+") as log:
            codes = codes_of(job, log.fileno())
            log.seek(0)
            print(json.dumps({"codes": codes, "text": log.read()}), flush=True)
