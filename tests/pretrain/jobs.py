"""Training jobs of the tests: a Megatron-LM script under torchrun on CPU, and what it printed."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.forks import LIMITED, Forks, free_port

ROOT = Path(__file__).parents[2]
LAUNCHER = ("-m", "megatron_autorecompute.pretrain")
WITHOUT_US = (str(Path(__file__).with_name("without_us.py")),)
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-3 --lr-decay-iters 100 --vocab-size 127 --tokenizer-type NullTokenizer "
    "--position-embedding-type rope --disable-bias-linear --transformer-impl local "
    "--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion "
    "--log-interval 1 --eval-iters 0 --eval-interval 1000 "
)
"""Dropout is 0.1 by default, so that a wrong generator state in a recompute shows."""

FOUR_RANKS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer "
)


@dataclass(frozen=True)
class Output:
    """What a job printed, and torchrun's exit code."""

    returncode: int
    text: str

    @property
    def losses(self) -> list[str]:
        """Loss and gradient norm of every step, digit by digit as Megatron prints them."""
        return re.findall(r"lm loss: \S+ .*grad norm: \S+", self.text)

    @property
    def validation_losses(self) -> list[str]:
        """Of every evaluation, digit by digit."""
        return re.findall(r"lm loss value: \S+", self.text)

    @property
    def weights(self) -> list[str]:
        """A digest of every rank's weights, by rank."""
        return sorted(re.findall(r"weights of rank \d+: [0-9a-f]{64}", self.text))

    @property
    def said(self) -> list[str]:
        """The lines in which this package says why it ends the job."""
        return re.findall(r"megatron-autorecompute: .*", self.text)


def logged_ms(text: str, iteration: int) -> dict[str, float]:
    """Megatron's timers in its log of an iteration, the slowest rank's; the first of each name."""
    step = re.split(rf"iteration +{iteration}/", text)[1]
    timers = re.findall(r"^ +([a-z-]+) \.+: \([\d.]+, ([\d.]+)\)", step, re.M)
    return {name: float(slowest) for name, slowest in reversed(timers)}


@dataclass(frozen=True)
class Job:
    """A job of `Launched`."""

    flags: str
    ranks: int = 1
    with_us: bool = True
    before: str | None = None
    """A script of this folder that runs first in every rank."""


def run(
    script: Path,
    flags: str,
    *,
    ranks: int = 1,
    way_in: tuple[str, ...] = LAUNCHER,
    python_path: tuple[str, ...] = (),
    timeout_s: float = 600,
) -> Output:
    """Start a job on CPU with torchrun and wait for it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), *way_in, str(script), *flags.split()]
    job = subprocess.run(
        [*LIMITED, *command, *(["--recompute-run-on-cpu"] if way_in == LAUNCHER else [])],
        env=_environment(python_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return Output(job.returncode, job.stdout)


class Launched:
    """One start of Python (`many`) that runs jobs of the launcher in forks of itself."""

    def __init__(self):
        self._forks = Forks("tests.pretrain.many", _environment())

    def __enter__(self):
        self._forks.__enter__()
        return self

    def __exit__(self, *raised):
        self._forks.__exit__(*raised)

    def run(self, script: Path, jobs: Sequence[Job], timeout_s: float = 600) -> list[Output]:
        """Run jobs one after another, `timeout_s` for each."""
        return [self.run_together(script, [job], timeout_s)[0] for job in jobs]

    def run_together(
        self, script: Path, jobs: Sequence[Job], timeout_s: float = 600
    ) -> list[Output]:
        """Run jobs at the same time, `timeout_s` for all."""
        told = [{**asdict(job), "script": str(script)} for job in jobs]
        ended = self._forks.run(*told, timeout_s=timeout_s)
        return [Output(max(map(abs, each.codes)), each.text) for each in ended]


def _environment(python_path: Sequence[str] = ()) -> dict[str, str]:
    paths = [*python_path, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_VCS_VERSION": "1",  # or megatron-core's version has the commit of our own checkout
    }
