"""Fit what H100's products and memory reach on our own steps that nothing disturbed.

    python -m benchmarks.gpu.fit

Needs no GPU, and megatron-core 0.17 or newer, which reads the flags. These jobs ran without
torch.compile, so that GELU with its bias was some twenty kernels and not two.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.gpu.predict import WITHOUT_MASKS
from benchmarks.measured import prediction, ratios
from megatron_autorecompute.meta.devices import Efficiency, device
from megatron_autorecompute.meta.profiling import profile_job

GPU = "h100-80gb"
RESULTS = Path(__file__).parents[1] / "results" / "gpu"
QUIET = 0.02
"""Of settled steps: longest less shortest, by their median, of those that nothing disturbed."""
ALIKE = 0.05
"""How much longer one may be than the shortest of equal flags."""
JOB = "job/7B, 4 layers"
ENVIRONMENT = (("torch_compile", False),)
"""What `run.py` sets for all its jobs."""
STEPS = 0.05
"""How far a figure is moved to see what follows; times are linear in its reciprocal."""


@dataclass(frozen=True)
class Step:
    """A job's settled steps."""

    name: str
    flags: tuple[str, ...]
    measured_ms: float

    def predicted_ms(self, efficiency: Efficiency) -> float:
        """Of the same flags, without a device."""
        case = prediction.Case(self.flags, (1,), GPU, environment=ENVIRONMENT)
        return prediction.step_ms(case, 1, efficiency)


def steps() -> list[Step]:
    """Of a 7B in bf16, those that nothing disturbed: all alike, and as short as any of their
    flags."""
    every = list(_every())
    shortest = {flags: min(m for _, f, m, _ in every if f == flags) for _, flags, _, _ in every}
    return [
        Step(name, flags, median)
        for name, flags, median, spread in every
        if spread < QUIET * median and median < (1 + ALIKE) * shortest[flags]
    ]


def _every() -> Iterator[tuple[str, tuple[str, ...], float, float]]:
    """Name, flags, and the settled steps' median and range."""
    for path in sorted(RESULTS.glob("*/results.json")):
        items = json.loads(path.read_text())["sections"].get("8-plugin", {}).get("items", {})
        for name, one in items.items():
            settled = one.get("settled_ms")
            if JOB in name and "fp8" not in name and settled:
                flags = (*one["flags"].split(), *WITHOUT_MASKS)
                spread = max(settled) - min(settled)
                yield f"{path.parent.name}: {name}", flags, statistics.median(settled), spread


def layer_measured_ms() -> dict[str, float]:
    """Of a layer of a 350M with unfused attention, without anything of the host."""
    items = json.loads((RESULTS / "3" / "results.json").read_text())["sections"]
    profile = json.loads(items["3-gpt-350m-unfused"]["items"]["profile"])
    choices = {one["choice"]: one for one in profile["kinds"][0]["choices"]}
    return _times(choices["none"], choices["selective[core_attn]"])


def layer_predicted_ms(efficiency: Efficiency) -> dict[str, float]:
    """The same without a device."""
    job = next(one.job for one in ratios.published() if one.name.startswith("350M"))
    kind = profile_job(job, device(GPU), efficiency, only=("core_attn",)).kinds[0]
    none, core_attn = kind.record("none"), kind.record("selective[core_attn]")
    assert none is not None
    assert core_attn is not None
    return _times(vars_of(none), vars_of(core_attn))


def vars_of(record: object) -> dict[str, float]:
    """The times of a choice's record."""
    return {name: getattr(record, name) for name in ("forward_ms", "backward_ms")}


def _times(none: dict[str, float], core_attn: dict[str, float]) -> dict[str, float]:
    return {
        "forward": none["forward_ms"],
        "backward": none["backward_ms"],
        "backward, core_attn": core_attn["backward_ms"],
    }


def predicted(own: Sequence[Step], efficiency: Efficiency) -> np.ndarray:
    """Milliseconds of every step and of the layer."""
    return np.array(
        [*(one.predicted_ms(efficiency) for one in own), *layer_predicted_ms(efficiency).values()]
    )


def main() -> None:
    own, reached = steps(), device(GPU).reaches
    measured = np.array([*(one.measured_ms for one in own), *layer_measured_ms().values()])
    shares = np.array([reached.gemm, reached.bandwidth])
    now = predicted(own, reached)

    def moved(name: str) -> np.ndarray:
        more = predicted(own, replace(reached, **{name: getattr(reached, name) / (1 + STEPS)}))
        return (more - now) / STEPS / measured

    slopes = np.column_stack([moved("gemm"), moved("bandwidth")])
    change = np.linalg.lstsq(slopes, 1 - now / measured, rcond=None)[0]
    names = [*(one.name for one in own), *layer_measured_ms()]
    for name, error in zip(names, now / measured - 1, strict=True):
        print(f"{name}: {error:+.1%}")
    for name, value in zip(("gemm", "bandwidth"), shares / (1 + change), strict=True):
        print(f"{name}: {value:.2f}, as it stands {getattr(reached, name):g}")


if __name__ == "__main__":
    main()
