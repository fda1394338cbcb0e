"""Rows that do not say enough to judge a prediction by them, whatever it predicts."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measured.prediction import Prediction
from benchmarks.measured.runs import Run

MOST_APART = 0.05
"""Between two runs of equal flags on equal GPUs."""
MOST_BETWEEN_STEPS = 2.0
"""Between what a run holds between steps and the weights, gradients and optimizer of its flags."""


MOST_OF_UNSAID = 0.05
"""The same, where the number of GPUs that comes nearest was taken because the row has none."""


MOST_OF_BLOCKS = 0.01
"""Between two runs of equal flags, by which holes tensors fell into."""
EXPERTS, WEIGHTED_BEFORE = "--num-experts", "2025-04-09"
"""Megatron-LM 265963072: experts weight their tokens, before that `unpermute` did."""
EP_OVERLAP, EP_OVERLAP_RELEASES = "--overlap-moe-expert-parallel-comm", "2026-01-06"
"""Megatron-LM a56a0b001 `release_state`: "this helps avoid memory leak"."""


def doubts(pairs: Sequence[tuple[Run, Prediction | None]]) -> list[str]:
    """For each run why its row does not suffice; empty if it does.

    Two runs of equal flags that measured other peaks differ in something that neither row says:
    then the newest is judged, of equally new ones that in Megatron's development container.
    """
    newest: dict[tuple[object, ...], Run] = {}
    for run in sorted(
        (run for run, _ in pairs if not run.uncovered),
        key=lambda run: (run.date, not run.old_container),
    ):
        newest[_key(run)] = run
    started: dict[tuple[object, ...], int] = {}
    for run, _ in pairs:
        if not run.uncovered and not run.reached_at_once:
            started[_job(run)] = max(started.get(_job(run), 0), run.measured[0].peak_bytes)
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run, _ in pairs:
        alike.setdefault(_values(run), []).append(run)
    return [
        ""
        if run.uncovered
        else _by_copying(run, alike[_values(run)])
        or _by_another(run, newest[_key(run)])
        or _by_loading(run, started.get(_job(run)))
        or _by_itself(run, found)
        for run, found in pairs
    ]


def _key(run: Run) -> tuple[object, ...]:
    return run.source, run.flags, run.gpu, run.worlds, run.environment


def _job(run: Run) -> tuple[object, ...]:
    return run.source, run.flags, run.gpu, run.worlds


def _values(run: Run) -> tuple[object, ...]:
    peaks = tuple((one.stage, one.peak_bytes) for one in run.measured)
    return run.source, run.gpu, run.step_ms, run.first_step_bytes, peaks


def _by_copying(run: Run, alike: Sequence[Run]) -> str:
    """alike: runs with the same step, to the last digit, and the same peaks, to the byte."""
    if run.step_ms is None or run.first_step_bytes is None:
        return ""
    for other in alike:
        if {*other.flags} < {*run.flags}:
            more = " ".join(flag for flag in run.flags if flag not in other.flags)
            return (
                f"step and peaks are those of {other.name}, which has no {more}: the file was "
                "copied"
            )
    return ""


def _by_loading(run: Run, most_bytes: int | None) -> str:
    """most_bytes: of runs of the same job whose peaks are known to be of a step."""
    if not run.reached_at_once or most_bytes is None:
        return ""
    more = run.measured[0].peak_bytes / most_bytes - 1
    if more <= MOST_OF_BLOCKS:
        return ""
    return (
        f"goes on from a checkpoint: the peak, {more:+.1%} against the same job from the start, is "
        "that of loading, or of the first step after it; no later step took as much"
    )


def _by_another(run: Run, newest: Run) -> str:
    if newest is run or len(newest.measured) != len(run.measured):
        return ""
    pairs = zip(run.measured, newest.measured, strict=True)
    apart = max((own.peak_bytes / new.peak_bytes - 1 for own, new in pairs), key=abs)
    if abs(apart) <= MOST_APART:
        return ""
    container = ", in Megatron's container of long support," * run.old_container
    return (
        f"of {run.date}{container} {apart:+.0%} against the run of {newest.date} with the same "
        "flags on the same GPUs: container and environment are not in the row"
    )


def _by_itself(run: Run, found: Prediction | None) -> str:
    if EP_OVERLAP in run.flags and "" < run.date < EP_OVERLAP_RELEASES:
        return (
            f"of {run.date}: until {EP_OVERLAP_RELEASES} the parts of layers under EP overlap kept "
            "their tensors until Python collected garbage (Megatron-LM a56a0b001, #2236)"
        )
    if found and found.without_quantising:
        peak_bytes = found.without_quantising[run.measured[0].stage].peak_bytes
        return (
            "which layers are quantised is in a file that is not public: predicted with every "
            f"linear layer quantised; with none it would be {peak_bytes / 1e9:.3f} GB"
        )
    if EXPERTS in run.flags and "" < run.peaks_since < WEIGHTED_BEFORE:
        return (
            f"of {run.peaks_since} or before: until {WEIGHTED_BEFORE} tokens were weighted after "
            "their experts, which kept other tensors (Megatron-LM 265963072)"
        )
    if run.between_steps_bytes is None or found is None or not found.stages:
        return ""
    if _by_starting(run, found):
        return (
            "its first step took most, and no later one as much, which have Adam's moments besides:"
            " something that comes once, such as compiling; the container is not in the row"
        )
    static, between = found.stages[run.measured[0].stage].parts["static"], run.between_steps_bytes
    held = f"{between / 1e9:.2f} GB between steps, {static / 1e9:.2f} by its flags"
    if max(static, between) > MOST_BETWEEN_STEPS * min(static, between):
        return f"{held}: another model"
    if len(run.worlds) > 1 and abs(static / between - 1) > MOST_OF_UNSAID:
        return f"{held} and the nearest number of GPUs, which is not in the row"
    return ""


def _by_starting(run: Run, found: Prediction) -> bool:
    """Whether the peak is no step's, but of what comes once."""
    stage, peak_bytes = found.stages[run.measured[0].stage], run.measured[0].peak_bytes
    if stage.first_step_bytes is None or run.first_step_bytes != peak_bytes:
        return False
    return stage.first_step_bytes < (1 - MOST_OF_BLOCKS) * stage.peak_bytes
