"""Training jobs of the tests: a Megatron-LM script under torchrun on CPU, and what it printed."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ("-m", "megatron_autorecompute.pretrain")
WITHOUT_US = (str(Path(__file__).with_name("without_us.py")),)
MEMORY_BYTES = 16 << 30
LIMITED = ("sh", "-c", f'ulimit -v {MEMORY_BYTES >> 10} && exec "$@"', "sh")
"""Goes before a command. Not `preexec_fn`: that runs Python in a fork, which may wait for ever for
a lock that another thread of this process held, and no timeout of `subprocess` covers it."""

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
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
    """One of `run_many`'s jobs."""

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
    timeout_s: float = 120,
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


def run_many(script: Path, jobs: Sequence[Job], timeout_s: float = 60) -> list[Output]:
    """Run jobs one after another from one start of Python (`many`), `timeout_s` for each."""
    told = [{**asdict(job), "script": str(script), "timeout_s": timeout_s} for job in jobs]
    process = subprocess.run(
        [*LIMITED, sys.executable, str(Path(__file__).with_name("many.py"))],
        input=json.dumps(told),
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s * (1 + len(jobs)),
    )
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(lines) == len(jobs)
    return [Output(max(map(abs, line["codes"])), line["text"]) for line in lines]


def _environment(python_path: Sequence[str] = ()) -> dict[str, str]:
    paths = [*python_path, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
