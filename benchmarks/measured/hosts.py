"""Fit the host's times on the small tests of Megatron, whose GPU waits for launches.

    python -m benchmarks.measured.hosts

Prints, for devices.json and machines.py: on H100 microseconds for an operation of torch, for a
module of Transformer Engine, and for an exchange of a ring, and how many times as long AWS's hosts
take; on A100 and GB200 how many times as long as H100's (benchmarks/results/hosts.txt). Needs
megatron-core 0.19 on the path.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from rich.progress import track
from scipy.optimize import minimize

from benchmarks.measured import times
from benchmarks.measured.__main__ import ROWS, case
from benchmarks.measured.machines import AWS, HOSTS
from benchmarks.measured.prediction import Case, step_ms
from benchmarks.measured.runs import Run
from benchmarks.measured.tables import read
from megatron_autorecompute.meta.devices import Efficiency, device

FIELDS = ("host_us", "module_us", "exchange_us")
STEP = 0.1
"""By which each is moved to see how much of a step it is."""
MOST = 0.25
"""For which a test counts at most, so that those that nothing explains do not move the fit."""
H100 = "h100-80gb"


@dataclass(frozen=True, slots=True)
class Parts:
    """Milliseconds of a step: what no host decides, and by field what H100's host does."""

    rest: float
    of_host: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Test:
    """A small test, and its step."""

    gpu: str
    machine: str
    parts: Parts
    measured_ms: float


def parts(one: Case) -> Parts:
    """Of a test, by how its step changes with each field; spans in which the host is the slower
    one stay so."""
    [world], usual = one.worlds, _usual(one.gpu)
    whole = step_ms(one, world, usual)
    moved = [step_ms(one, world, usual.scaled(name, 1 + STEP)) for name in FIELDS]
    of_host = tuple((ms - whole) / STEP for ms in moved)
    return Parts(whole - sum(of_host), of_host)


def _usual(gpu: str) -> Efficiency:
    """A device with the host of H100."""
    known = device(H100).reaches
    return replace(device(gpu).reaches, **{name: getattr(known, name) for name in FIELDS})


def small_tests(processes: int) -> list[Test]:
    """Every test that hosts are fitted on."""
    runs = [run for path in ROWS for run in read(path) if isinstance(run, Run) and _fitted(run)]
    cases = [replace(case(run), host=1.0) for run in runs]
    known = list(dict.fromkeys(cases))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as workers:
        found = track(workers.map(parts, known), description="tests", total=len(known))
        by_case = dict(zip(known, found, strict=True))
    return [
        Test(run.gpu, run.machine, by_case[one], run.step_ms or 0.0)
        for run, one in zip(runs, cases, strict=True)
    ]


def _fitted(run: Run) -> bool:
    if run.uncovered or run.step_ms is None or run.encoder_decoder:
        return False
    offloads = "--fine-grained-activation-offloading" in run.flags
    point = {"role": times.role(run), "measured_ms": run.step_ms, "run": run.name}
    return times.fitted(point) and not offloads and times.ONE_NODE not in run.name


def loss(predicted_ms: np.ndarray, measured_ms: np.ndarray) -> float:
    """Mean size of the logarithm of predicted to measured, of which a test counts for `MOST`."""
    return float(np.minimum(np.abs(np.log(predicted_ms / measured_ms)), MOST).mean())


def fitted(chosen: Sequence[Test], *, one_factor: bool) -> np.ndarray:
    """Factors of the three fields, and of AWS's hosts; with one_factor of all three together."""
    rest = np.array([test.parts.rest for test in chosen])
    of_host = np.array([test.parts.of_host for test in chosen])
    measured = np.array([test.measured_ms for test in chosen])
    at_aws = np.array([test.machine == AWS for test in chosen])

    def of(factors: np.ndarray) -> float:
        *fields, aws = [*factors] if not one_factor else [*([factors[0]] * 3), 1.0]
        host = of_host @ np.array(fields) * np.where(at_aws, aws, 1.0)
        return loss(rest + host, measured)

    starts = [np.ones(1)] if one_factor else [np.array([1.0, 1.0, 1.0, HOSTS[AWS]])]
    found = [
        minimize(of, start * by, method="Nelder-Mead", options={"maxfev": 5000, "xatol": 1e-5})
        for start in starts
        for by in (0.9, 1.0, 1.1, 1.5)
    ]
    best: np.ndarray = min(found, key=lambda one: one.fun).x
    return best


def main() -> None:
    every = small_tests(processes=2)
    *fields, aws = fitted([test for test in every if test.gpu == H100], one_factor=False)
    for name, factor in zip(FIELDS, fields, strict=True):
        print(f"{H100} {name}: {factor * getattr(device(H100).reaches, name):.1f}")
    print(f"AWS's hosts: {aws:.2f} times as long")
    own = [test for test in every if test.gpu == H100]
    for said, factors in (("so", (*fields, aws)), ("as it stands", (1.0, 1.0, 1.0, HOSTS[AWS]))):
        print(f"{said} tests err by {_median_error(own, factors):.1%} (median)")
    for gpu in sorted({test.gpu for test in every} - {H100}):
        own = [test for test in every if test.gpu == gpu]
        moved = [_with(test, fields) for test in own]
        print(f"{gpu}: {fitted(moved, one_factor=True)[0]:.2f} times as long, {len(own)} tests")


def _median_error(chosen: Sequence[Test], factors: Sequence[float]) -> float:
    """Of predicted steps with these factors of the fields, and of AWS's hosts."""
    *fields, aws = factors
    ratios = [
        _step_ms(_with(test, fields), aws if test.machine == AWS else 1.0) / test.measured_ms
        for test in chosen
    ]
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def _step_ms(test: Test, factor: float) -> float:
    return test.parts.rest + factor * sum(test.parts.of_host)


def _with(test: Test, fields: Sequence[float]) -> Test:
    """The test with H100's host as fitted."""
    own = zip(test.parts.of_host, fields, strict=True)
    return replace(test, parts=replace(test.parts, of_host=tuple(ms * by for ms, by in own)))


if __name__ == "__main__":
    main()
