"""Jobs of `bridge_pretrain` in forks of a process that has imported Bridge (tests/forks.py)."""

import importlib
import runpy
import sys

import torch

from megatron_autorecompute.meta import without_cuda
from testing import bridge_launch as launch
from tests.forks import serve

LAUNCHED = "megatron_autorecompute.bridge_pretrain"
IMPORTED = (
    "megatron.bridge.recipes",
    "megatron.bridge.training.gpt_step",
    "megatron_autorecompute.integrations.megatron_lm",
    "megatron_autorecompute.runtime.attach",
    "hydra.core.override_parser.overrides_parser",
    "hydra._internal.config_loader_impl",
)


def import_everything():
    torch.set_num_threads(1)
    without_cuda.activate()
    launch.prepare()
    launch.print_weights()
    for name in IMPORTED:
        importlib.import_module(name)


def main(job):
    sys.argv = [LAUNCHED, *job["arguments"]]
    runpy.run_module(LAUNCHED, run_name="__main__")


if __name__ == "__main__":
    serve(import_everything, main)
