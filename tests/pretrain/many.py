"""Small training jobs in forks of a process that has imported Megatron (tests/forks.py).

Nothing of Megatron is changed before the fork: every job goes through the launcher, or through
`without_us`, from its first line.
"""

import argparse
import ast
import functools
import importlib
import inspect
import json
import os
import runpy
import sys
import types
from pathlib import Path

from megatron_autorecompute.meta import without_cuda
from tests.forks import serve

HERE = Path(__file__).parent
IMPORTED = (
    "megatron.training.training",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
    "megatron_autorecompute.integrations.megatron_lm",
    "megatron_autorecompute.runtime.attach",
    "highspy",
    "scipy.optimize",
)


class EventFile:
    """Stands in for torch.utils.tensorboard.SummaryWriter where tensorboard is not installed."""

    def __init__(self, log_dir, **_):
        os.makedirs(log_dir, exist_ok=True)
        self.path = Path(log_dir, "events.jsonl")

    def add_scalar(self, name, value, step, *_):
        with self.path.open("a") as file:
            print(json.dumps([name, float(value), step]), file=file)

    def __getattr__(self, _):  # add_text, flush, close
        return lambda *args, **named: None


def import_everything():
    with without_cuda.activate(training=True):  # as megatron.training 0.19 needs on Python 3.11
        for name in IMPORTED:
            importlib.import_module(name)
        read_sources()
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = EventFile
    sys.modules[writer.__name__] = writer


def read_sources():
    """Megatron's flags have the docstrings of fields, for which it reads its own sources again in
    every process, most of a second in all."""
    from megatron.training.arguments import add_megatron_arguments

    inspect.getsource = functools.cache(inspect.getsource)
    ast.parse = functools.cache(ast.parse)
    add_megatron_arguments(argparse.ArgumentParser())


def main(job):
    sys.argv = command = [job["script"], *job["flags"].split()]
    if job["before"] is not None:
        runpy.run_path(str(HERE / job["before"]))
    if job["with_us"]:
        from megatron_autorecompute import pretrain
        from megatron_autorecompute.integrations import megatron_lm

        megatron_lm.RANK_0_SPEAKS_S = 0.5  # nobody here ends a rank that outlives rank 0

        sys.argv = ["pretrain", *command, "--recompute-run-on-cpu"]
        pretrain.main()
    else:
        sys.argv = [str(HERE / "without_us.py"), *command]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(import_everything, main)
