"""Peak rates of devices, and the shares of them that operations are assumed to reach.

Peaks come from `devices.json`, which names their sources. The shares are assumptions, printed with
every result; nothing here is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.units import GIB

_SAYS_NOTHING = re.compile(r"nvidia|gpu|sxm\d?|hbm\d?e?")
"""Words of a GPU's name that every known device could have."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Assumed shares of the peaks that kernels reach; they are the same for all choices."""

    gemm: float = 0.6
    """Matrix products."""
    attention: float = 0.5
    """Fused attention."""
    bandwidth: float = 0.8
    """Device memory, for kernels that mostly move bytes."""
    communication: float = 0.7
    """Links between devices."""

    def scaled(self, name: str, factor: float) -> Efficiency:
        """The same with one share times `factor`."""
        return replace(self, **{name: getattr(self, name) * factor})


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Rates are peaks, per second."""

    name: str
    capability: float
    """CUDA's compute capability: 9.0 is Hopper, 10.0 and 10.3 are Blackwell."""
    memory_bytes: int
    flops: Mapping[str, float]
    """By precision: bf16, fp8, fp4; without the precisions that the device lacks."""
    bandwidth_bytes: float
    link_bytes: float
    """Bytes per second in one direction, within a group of `link_domain` GPUs."""
    link_domain: int
    network_bytes: float
    """Bytes per second in one direction, between such groups."""
    source: str

    @property
    def needs_fp8_transposes(self) -> bool:
        """Whether fp8 products with one scale per tensor need a transposed copy of a weight: not on
        Blackwell's data-center GPUs (TE pytorch/utils.py `is_non_tn_fp8_gemm_supported`)."""
        return not (10 <= self.capability < 12 or self.capability >= 13)

    def rate(self, precision: str) -> float:
        """Peak of matrix products, in FLOP/s; OptionError if the device lacks the precision."""
        if precision not in self.flops:
            raise OptionError(
                f"{self.name} has no {precision} arithmetic; it has {', '.join(self.flops)}. "
                "Choose another precision or --gpu."
            )
        return self.flops[precision]


def devices() -> dict[str, Device]:
    """Every device of devices.json by its name."""
    text = resources.files(__package__).joinpath("devices.json").read_text()
    return {name: _device(name, d) for name, d in json.loads(text).items() if name != "units"}


def device(name: str) -> Device:
    """One device, by its name or by another name that can only mean it.

    `h100`, `H100-SXM` and torch's `NVIDIA H100 80GB HBM3` are h100-80gb. Raises OptionError with
    the known names for anything else, such as another form or another memory of the same chip.
    """
    known = devices()
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"(\d) *gb\b", r"\1gb", name.lower())))
    said = {word for word in words if not _SAYS_NOTHING.fullmatch(word)}
    for each in known:
        chip, memory = each.split("-")
        if chip in said and said <= {chip, memory}:
            return known[each]
    raise OptionError(f"Unknown GPU {name!r}. Known: {', '.join(known)}.")


def _device(name: str, data: Mapping[str, object]) -> Device:
    def number(key: str) -> float:
        return float(str(data[key]))

    tflops = data["tflops"]
    assert isinstance(tflops, dict), "devices.json is ours"
    return Device(
        name,
        number("capability"),
        round(number("memory_gib") * GIB),
        {precision: value * 1e12 for precision, value in tflops.items()},
        number("bandwidth") * 1e9,
        number("link") * 1e9,
        int(number("link_domain")),
        number("network") * 1e9,
        str(data["source"]),
    )
