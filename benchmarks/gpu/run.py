"""Measure on this machine what the package claims; everything lands in one JSON file.

    python -m benchmarks.gpu.run                        # all parts
    python -m benchmarks.gpu.run --only 1 --only 3-moe-8-experts
    python -m benchmarks.gpu.run --tiny --output build/gpu-dry   # a dry run, on CPU too

Every part runs in a process of its own, for at most --part-minutes; run again, it goes on where it
stopped. Exit code 0: all is complete; 11: something is left to do, and what is said last.
Off CUDA there is the dry run only.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import cases, children, page
from benchmarks.gpu.cases import (
    CURVES,
    DENSE_8K,
    DENSE_32K,
    DEVICE_BOUND,
    GPT3_760M,
    OFFLOADING,
    Case,
    has_te,
    started,
)
from benchmarks.gpu.results import Ledger, OutOfTimeError, Results, Section, key_of
from megatron_autorecompute.errors import AutorecomputeError, MachineError, OptionError

PLUGIN = "plugin"
GRACE_S = 45.0
"""Starting Python, Megatron and CUDA, and the item that is running when a part's time ends."""
SECTIONS: dict[str, tuple[int, Case | None]] = {
    key_of(part, case.name if case else PLUGIN): (part, case)
    for part, cases in (
        (1, (GPT3_760M,)),
        (5, CURVES[:1]),
        (2, CURVES[:1]),
        (3, CURVES[:1]),
        (4, (None,)),
        (8, (None,)),
        (6, (None,)),
        (7, (None,)),
        (2, (*CURVES[1:], *DEVICE_BOUND)),
        (3, CURVES[1:]),
        (5, CURVES[1:]),
        (10, (*CURVES, DENSE_8K, DENSE_32K)),
        (9, tuple(case for case, *_ in OFFLOADING.values())),
        (11, (None,)),
    )
    for case in cases
}
"""In the order they run: what needs torch and megatron-core alone comes first."""
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Fragments then cost pages, not whole segments: the limit is met nearly to the byte.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""What every section runs under, unless the environment says otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        with _quiet():
            return _one(options) if options.section else _all(options, given)
    except AutorecomputeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted: what was finished is in the output folder.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    folders = "default: benchmarks/results/gpu, or build/gpu-dry with --tiny"
    add("--output", type=Path, help=f"folder ({folders})")
    add("--only", action="append", default=[], help="a part (1 to 11) or section; repeatable")
    add("--tiny", action="store_true", help="a size that runs anywhere in seconds and proves none")
    add("--part-minutes", type=float, default=8.0, help="longest one section runs (default: 8)")
    add("--minutes", type=float, default=1e9, help="begin no section that may end later than this")
    add("--rounds", type=int, default=7, help="timed turns of every strategy (default: 7)")
    add("--megatron-lm", type=Path, help="a Megatron-LM checkout, for part 7")
    add("--section", help=argparse.SUPPRESS)
    return parser


def selected(only: Sequence[str]) -> list[str]:
    """The sections asked for, in the order they run.

    Raises: OptionError for a name that is neither a part nor a section.
    """
    parts = {str(part) for part, _ in SECTIONS.values()}
    unknown = [name for name in only if name not in parts and name not in SECTIONS]
    if unknown:
        raise OptionError(
            f"--only {', '.join(unknown)}: there are parts 1 to 11 and the sections "
            f"{', '.join(SECTIONS)}."
        )
    return [k for k, (part, _) in SECTIONS.items() if not only or k in only or str(part) in only]


# --- the parent: one process a section ------------------------------------------------------------


def _all(options: argparse.Namespace, given: Sequence[str]) -> int:
    end = time.monotonic() + 60 * options.minutes
    names, path, machine = selected(options.only), _file(options), _machine()
    if machine["device"] == "CPU" and not options.tiny:
        raise MachineError(
            "No CUDA device here, and times of a CPU prove nothing about a GPU. Run this on a "
            "machine with CUDA, or give --tiny for a dry run."
        )
    Results.open(path, machine, tiny=options.tiny).save()
    left = []
    for name in names:
        if Results.load(path).sections.get(name, Section(0, "")).complete:
            continue
        seconds = min(60 * options.part_minutes, end - time.monotonic()) - GRACE_S
        if seconds <= 0:
            left.append(name)
            continue
        print(f"{name}", flush=True)
        said = _child(given, name, seconds)
        results = Results.load(path)
        part, case = SECTIONS[name]
        section = results.section(part, case.name if case else PLUGIN)
        section.stopped = said
        section.complete = not said
        results.save()
        page.write(results, path.parent)
        if said:
            print(f"  stopped: {said}", flush=True)
            left.append(name)
    print(f"Not complete: {', '.join(left)}" if left else f"Complete: {path}")
    return OutOfTimeError.exit_code if left else 0


def _child(given: Sequence[str], name: str, seconds: float) -> str:
    """Run one section; why it did not end, or an empty text."""
    command = [sys.executable, "-m", "benchmarks.gpu.run", *given, "--section", name]
    command += ["--part-minutes", str(seconds / 60)]
    environment = {**ENVIRONMENT, **os.environ}
    # A section ends its own processes first, which takes longer than ending one.
    with children.group(command, grace_s=30, env=environment, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(timeout=seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            return f"killed after {seconds + GRACE_S:.0f} s; run the part again to go on"
    if process.returncode == 0:
        return ""
    print(said, file=sys.stderr)
    every = said.strip().splitlines() or ["no word"]
    # What torch says last, of a process group left behind, is not why.
    errors = [line for line in every if re.search(r"Error\b|\berror:", line)]
    return f"exit code {process.returncode}: {(errors or every)[-1]}"


def _file(options: argparse.Namespace) -> Path:
    usual = Path("build/gpu-dry" if options.tiny else "benchmarks/results/gpu")
    return (options.output or usual) / "results.json"


def _machine() -> dict[str, str]:
    """What the pages say of the machine, and what resuming compares."""
    return cases.machine() | {n: os.environ.get(n, value) for n, value in ENVIRONMENT.items()}


# --- a section ------------------------------------------------------------------------------------


def _one(options: argparse.Namespace) -> int:
    part, case = SECTIONS[options.section]
    case = case.sized(options.tiny) if case else None
    results = Results.open(_file(options), _machine(), tiny=options.tiny)
    section = results.section(part, case.name if case else PLUGIN)
    rounds = 2 if options.tiny else options.rounds
    section.configure(
        {**case.configuration(), "rounds": rounds} if case else _plugin_configuration(part, options)
    )
    ledger = Ledger(results, section, 60 * options.part_minutes)
    if case is None:
        _processes()[part](ledger, options)
        return 0
    if case.needs_te() and not has_te():
        raise OptionError(f"{case.name} needs Transformer Engine; benchmarks/gpu/README.md: wheels")
    with started():
        _trainings()[part](case, ledger, rounds)
    return 0


def _plugin_configuration(part: int, options: argparse.Namespace) -> dict[str, Any]:
    if part == 4:
        from benchmarks.gpu.models import LOCAL, TE, gated_delta_net

        models = {**LOCAL, **TE, "gated delta net": gated_delta_net}
        return {name: make().configuration() for name, make in models.items()}
    if part == 6:
        from benchmarks.gpu.processes import AUTO_FRACTION, auto_flags

        flags = auto_flags(options.tiny)
        return {**flags, "budget, from full to none": AUTO_FRACTION}
    if part == 11:
        from benchmarks.gpu.stages import job_of

        return asdict(job_of(options.tiny))
    if part == 8:
        from benchmarks.gpu.processes import flag_jobs_of

        return flag_jobs_of(options.tiny)
    return {"Megatron-LM": cases.commit(options.megatron_lm) if options.megatron_lm else "none"}


def _trainings() -> dict[int, Callable[[Case, Ledger, int], None]]:
    from benchmarks.gpu import parts
    from benchmarks.gpu.contest import Contest

    def on(part: Callable[..., None], case: Case, ledger: Ledger, rounds: int) -> None:
        part(Contest(case), ledger, rounds)

    known = {
        1: parts.autodist,
        2: parts.curve,
        3: parts.fidelity,
        5: parts.overhead,
        9: parts.offload,
        10: parts.checkpoints,
    }
    return {number: partial(on, part) for number, part in known.items()}


def _processes() -> dict[int, Callable[[Ledger, Any], None]]:
    from benchmarks.gpu import processes, stages

    return {
        4: processes.equality,
        6: processes.auto,
        7: processes.upstream,
        8: processes.by_flags,
        11: stages.stages,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Megatron says about missing Transformer Engine and Apex at import."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        yield


if __name__ == "__main__":
    # Processes that this one started end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
