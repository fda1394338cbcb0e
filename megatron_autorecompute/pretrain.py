"""Run an untouched Megatron-LM training script with `--recompute-policy`.

    torchrun --nproc-per-node 8 -m megatron_autorecompute.pretrain \\
        path/to/pretrain_gpt.py <its usual flags> --recompute-policy auto

Everything after the script's path is the script's own command line. `integrations.megatron_lm` says
what is changed in Megatron at run time.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from megatron_autorecompute.errors import AutorecomputeError, MachineError, OptionError
from megatron_autorecompute.integrations import megatron_lm
from megatron_autorecompute.options import add_flags
from megatron_autorecompute.packages import needed
from megatron_autorecompute.policy import GRAMMAR
from megatron_autorecompute.runtime.auto_options import AutoOptions

RUN_ON_CPU = "--recompute-run-on-cpu"
POLICY_HELP = f"what every layer recomputes: auto measures and solves; otherwise {GRAMMAR}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script named first in `arguments` (default: `sys.argv[1:]`) as `__main__`.

    Raises: SystemExit with the reason printed and the exit code of an `AutorecomputeError`."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] in (["-h"], ["--help"]):
        _parser().print_help()
        return
    try:
        script = _script(command)
        # As `python script.py` does, which follows links: the checkout's own megatron then comes
        # before an installed one.
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        with needed("The launcher"):
            _prepare_device(command)
            megatron_lm.install()
        sys.argv = command
        _run(script)
        megatron_lm.leave_together()
    except AutorecomputeError as error:
        megatron_lm.end(error)


def _parser() -> argparse.ArgumentParser:
    """A parser of our own flags, only for `--help`; in a job Megatron parses them."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_autorecompute.pretrain",
        usage="%(prog)s SCRIPT [flags of the script] [the flags below]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recompute-policy", metavar="POLICY", help=POLICY_HELP)
    add_flags(parser, AutoOptions)
    return parser


def _run(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):  # --exit-interval and --recompute-plan-only end with 0
            raise


def _script(command: Sequence[str]) -> str:
    if not command or not os.path.isfile(command[0]):
        raise OptionError(
            f"The first argument is {command[0] if command else 'missing'}; it must be the path of "
            "a Megatron-LM script: python -m megatron_autorecompute.pretrain pretrain_gpt.py FLAGS."
        )
    return command[0]


def _prepare_device(command: Sequence[str]) -> None:
    if RUN_ON_CPU in command:
        megatron_lm.prepare_cpu()
        return
    import torch

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(command):
        raise MachineError(
            "Megatron needs CUDA and there is no CUDA device here. To try a small model on CPU add "
            f"{RUN_ON_CPU} and --distributed-backend gloo --transformer-impl local."
        )


if __name__ == "__main__":
    main()
