"""Parts 4 and 6 to 8: what needs processes of its own, pytest's or a training script's."""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import flag_jobs
from benchmarks.gpu.children import lines
from benchmarks.gpu.results import OUTCOMES, BenchmarkError, Ledger, between
from megatron_autorecompute.errors import MachineError, OptionError

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("pretrain.py")
APEX_STAND_IN = Path(__file__).with_name("apex_stand_in")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
AUTO_FRACTION = 0.3
"""Where the tight budget of part 6 stands between full and none."""
UPSTREAM = {
    "transformer/test_transformer_block.py": "",
    "ssm/test_hybrid_block.py": "recompute",
    "transformer/test_attention.py": "checkpointed",
    "transformer/test_multi_latent_attention.py": "",
    "transformer/moe/test_moe_layer.py": "recompute",
    "transformer/test_multi_token_prediction.py": "",
    "tensor_parallel/test_random.py": "",
}
"""Upstream's tests of recompute below tests/unit_tests, each with the -k that picks them."""
WAYS = {
    "without us": None,
    "idle": "benchmarks.gpu.idle",
    "through ours": "benchmarks.gpu.through_ours",
}
"""How part 7 runs them, with the pytest plugin that makes it so."""
FIRST_PORT = 29500


# --- 4: equality ----------------------------------------------------------------------------------


def equality(ledger: Ledger, options: Namespace) -> None:
    """tests/gpu, test by test. What follows a failure runs in a process that knows nothing of it.

    Raises: BenchmarkError unless every test has passed.
    """
    anywhere = {"GPU_TESTS_ANYWHERE": "1"} if options.tiny else {}
    tests = ledger.item("tests", lambda: _collected(ledger.seconds_left()))
    items = ledger.section.items
    while left := [test for test in tests if f"test/{test}" not in items]:
        ledger.check(left[0])
        failed, line = False, ""
        for line in lines(
            [*PYTEST, "-v", "-x", *left],
            ledger.seconds_left(),
            cwd=ROOT,
            # Reasons of skips are cut at the terminal's width.
            env={**_environment(), **anywhere, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        ):
            print(line, end="", flush=True)
            if found := outcome(line):
                ledger.note(f"test/{found[0]}", found[1])
                failed |= found[1] == "failed"
        died = [test for test in left if f"test/{test}" not in items]
        if died and not failed:
            ledger.note(f"test/{died[0]}", f"failed: pytest died, and said last: {line.strip()}")
    said = [items[f"test/{test}"].partition(":")[0] for test in tests]
    if set(said) != {"passed"}:
        raise BenchmarkError(", ".join(f"{said.count(word)} {word}" for word in OUTCOMES))


def _collected(seconds: float) -> list[str]:
    """Every test of tests/gpu by its pytest name.

    Raises: MachineError when pytest finds none.
    """
    said = list(
        lines([*PYTEST, "--collect-only", "-q", "tests/gpu"], seconds, cwd=ROOT, env=_environment())
    )
    tests = [line.strip() for line in said if "::" in line and not line.startswith("ERROR")]
    if not tests:
        raise MachineError(f"pytest found no test in tests/gpu: {''.join(said)[-2000:]}")
    return tests


def outcome(line: str) -> tuple[str, str] | None:
    """A test and what became of it, from a line of `pytest -v`: passed, failed, or why skipped."""
    found = re.match(r"(\S+\.py::.+?) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))?", line)
    if found is None:
        return None
    name, word, reason = found.groups()
    if word == "SKIPPED":
        return name, f"skipped: {reason}"
    return name, "passed" if word == "PASSED" else "failed"


def _pytest(
    arguments: Sequence[str],
    *,
    cwd: Path,
    plugin: str | None,
    path: Sequence[str],
    seconds: float,
    env: Mapping[str, str],
) -> dict[str, Any]:
    """Outcome of every test (passed, skipped or failed), and the forwards that went through us.

    Raises: MachineError when pytest itself did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*PYTEST, "-q", f"--junitxml={report}", *arguments]
        command += ["-p", plugin] if plugin else []
        said = "".join(lines(command, seconds, cwd=cwd, env={**_environment(path), **env}))
        if not report.exists():
            raise MachineError(f"pytest wrote no report: {said[-2000:]}")
        counted = re.search(r"forwards through our policies: (\d+)", said)
        return {
            "outcomes": outcomes(report.read_text(encoding="utf-8")),
            "forwards": int(counted[1]) if counted else 0,
        }


def outcomes(junit: str) -> dict[str, str]:
    """The tests of a JUnit report, with what became of each."""
    found = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        marks = {child.tag for child in case}
        failed, skipped = marks & {"failure", "error"}, "skipped" in marks
        outcome = "failed" if failed else "skipped" if skipped else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def _environment(path: Sequence[str] = ()) -> dict[str, str]:
    paths = [*path, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


# --- 6: auto in the job ---------------------------------------------------------------------------


def auto(ledger: Ledger, options: Namespace) -> None:
    """50 steps of a training script with `--recompute-policy auto`, against the same without us."""
    flags = auto_flags(options.tiny)
    plain = ledger.item("without us", lambda: _job(flags["without us"], ledger))
    loose = ledger.item("none", lambda: _job(flags["none"], ledger))
    # Off CUDA nothing tells the peak: the dry run has a budget that everything fits.
    peaks = (plain["peak_bytes"], loose["peak_bytes"])
    budget = between(*peaks, AUTO_FRACTION) if torch.cuda.is_available() else 1 << 30
    budget_gib = budget / (1 << 30)
    asked = f"{flags['auto']} {budget_gib:.6f}"
    ledger.item("auto", lambda: {**_job(asked, ledger, with_us=True), "budget_gib": budget_gib})


def auto_flags(tiny: bool) -> dict[str, str]:
    """Flags of the three jobs; those of `auto` end before the budget in GiB, found on the way."""
    flags = _flags(tiny, 20 if tiny else 50)
    return {
        "without us": f"{flags} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "none": _flags(tiny, 3),
        "auto": f"{flags} --recompute-policy auto --recompute-memory-budget-gib",
    }


def _flags(tiny: bool, steps: int) -> str:
    """A GPT of 350M parameters, or a tiny one; dropout is 0.1 by default."""
    size = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 "
        if tiny
        else "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --bf16 "
    )
    on_cuda = torch.cuda.is_available()
    return (
        f"{size}--train-iters {steps} --lr 1e-4 --lr-decay-iters 1000 --vocab-size 255 "
        "--tokenizer-type NullTokenizer --position-embedding-type rope --disable-bias-linear "
        f"--transformer-impl local --distributed-backend {'nccl' if on_cuda else 'gloo'} "
        "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
        "--no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --log-interval 1 "
        "--eval-iters 0 --eval-interval 10000 --dataloader-type external --timing-log-level 0"
    )


def _job(
    flags: str, ledger: Ledger, *, with_us: bool = False, path: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the script with torchrun on one device; what it printed, step by step.

    Raises: MachineError when it ended early, but not for want of memory: that is a result.
    """
    on_cuda = torch.cuda.is_available()
    launcher = ["-m", "megatron_autorecompute.pretrain"] if with_us else []
    if not with_us and not on_cuda:
        launcher = [str(ROOT / "tests" / "pretrain" / "without_us.py")]
    cpu = ["--recompute-run-on-cpu"] if with_us and not on_cuda else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [*launcher, str(SCRIPT), *flags.split(), *cpu]
    begin = time.perf_counter()
    said = "".join(lines(command, ledger.seconds_left(), cwd=ROOT, env=_environment(path)))
    read = read_log(said)
    if f"--train-iters {len(read['losses'])} " not in flags and not read["out_of_memory"]:
        raise MachineError(f"The job ended early; it said last:\n{read['end']}")
    return {"seconds": time.perf_counter() - begin, "flags": flags, **read}


def read_log(text: str) -> dict[str, Any]:
    """Losses, step times and what this package said, from a job's output.

    The time lost is what the steps up to the decision took beyond the median of those after it.
    """
    steps = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+).*?(lm loss: \S+)", text)
    norms = re.findall(r"grad norm: \S+", text)
    times = [float(ms) for ms, _ in steps]
    peak = re.search(r"peak allocated bytes: (\d+)", text)
    before = re.search(r"bytes before every forward: ([\d ]+)", text)
    outside = re.search(r"bytes outside torch: (\d+)", text)
    settled = times[len(times) // 2 :]
    usual = statistics.median(settled) if settled else 0.0
    early = times[1 : len(times) // 2]  # the first step starts CUDA and allocates, with or without
    return {
        "losses": [f"{loss} {norm}" for (_, loss), norm in zip(steps, norms, strict=False)],
        "step_ms": times,
        "settled_ms": settled,
        "lost_s": sum(max(0.0, ms - usual) for ms in early) / 1e3,
        "peak_bytes": int(peak[1]) if peak else 0,
        "before_forwards_bytes": [int(count) for count in before[1].split()] if before else [],
        "outside_torch_bytes": int(outside[1]) if outside else 0,
        "out_of_memory": "OutOfMemoryError" in text or "out of memory" in text,
        "said": [line for line in text.splitlines() if line.startswith("recompute auto")],
        "end": text.partition("torch.distributed.elastic.multiprocessing.errors")[0][-3000:],
    }


# --- 7: upstream's tests --------------------------------------------------------------------------


def upstream(ledger: Ledger, options: Namespace) -> None:
    """Upstream's tests of recompute without us, with us idle, and with policies through ours.

    Raises: OptionError without a checkout.
    """
    if options.megatron_lm is None:
        raise OptionError("Part 7 runs upstream's tests: give a checkout with --megatron-lm PATH.")
    checkout = options.megatron_lm.resolve()
    tests = checkout / "tests" / "unit_tests"
    present = {name: k for name, k in UPSTREAM.items() if (tests / name).exists()}
    if not present:
        raise OptionError(f"{checkout} has none of {', '.join(UPSTREAM)} in tests/unit_tests.")
    for name, picked in present.items():
        asked = [str(tests / name), *(["-k", picked] if picked else [])]
        _in_every_way(ledger, name, asked, checkout)
    for way, plugin in WAYS.items():
        ran = [ledger.section.items[f"{way}: {name}"] for name in present]
        ledger.item(way, lambda ran=ran: {k: v for one in ran for k, v in one["outcomes"].items()})
        if plugin:
            ledger.item(f"forwards, {way}", lambda ran=ran: sum(one["forwards"] for one in ran))


def _in_every_way(ledger: Ledger, name: str, asked: Sequence[str], checkout: Path) -> None:
    """One file's tests in the ways that are not known yet, beside each other."""
    left = {w: plugin for w, plugin in WAYS.items() if f"{w}: {name}" not in ledger.section.items}
    if not left:
        return
    ledger.check(name)
    print(f"  {name}: {', '.join(left)}", flush=True)
    seconds = ledger.seconds_left()
    with ThreadPoolExecutor(len(left)) as pool:
        running = {
            way: pool.submit(
                _pytest,
                asked,
                cwd=checkout,
                plugin=plugin,
                path=[str(checkout)],
                seconds=seconds,
                # Upstream's tests meet on this port.
                env={"MASTER_PORT": str(FIRST_PORT + [*WAYS].index(way))},
            )
            for way, plugin in left.items()
        }
    for way, ran in running.items():
        ledger.note(f"{way}: {name}", ran.result())


# --- 8: jobs by their flags -----------------------------------------------------------------------


def by_flags(ledger: Ledger, options: Namespace) -> None:
    """Megatron's own jobs, without us: what predictions from the same flags are held against.

    Raises: BenchmarkError when a job failed; the others ran all the same.
    """
    failed = []
    for name, flags in flag_jobs_of(options.tiny).items():
        try:
            ledger.item(
                f"job/{name}", lambda flags=flags: _job(flags, ledger, path=[str(APEX_STAND_IN)])
            )
        except MachineError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    if failed:
        raise BenchmarkError(f"failed: {', '.join(failed)}")


def flag_jobs_of(tiny: bool) -> dict[str, str]:
    """Name and flags of every job of part 8."""
    if not tiny:
        return flag_jobs.JOBS
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return {k: f"{flags} --distributed-backend {backend}" for k, flags in flag_jobs.TINY.items()}
