"""Peak rates of devices, and what kernels and collectives are taken to reach of them.

Both come from `devices.json`, which names the source of every figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.profile import HostLink
from megatron_autorecompute.units import GIB, gib

_SAYS_NOTHING = re.compile(r"nvidia|gpu|sxm\d?|hbm\d?e?")
"""Words of a GPU's name that every known device could have."""
_NO_DEVICE = ("units", "sources")
USABLE = 0.5
"""The assumed share of a node's memory for copies; data loader and system have the rest."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a device reaches of its peaks, and its fixed times; the same for all choices. By default
    the peaks, and no fixed times."""

    gemm: float = 1.0
    """Share of the peak that large matrix products in bf16 reach."""
    gemm_quantised: float = 1.0
    """Share of the peak that large matrix products in fp8 and fp4 reach."""
    half_rows: float = 0.0
    """Rows of one expert at which grouped products reach half of that; 0: any number does."""
    half_rows_gradient: float = 0.0
    """Rows of one expert at which products for weight gradients reach half of that; 0: any does."""
    attention: float = 1.0
    """Share of the peak that fused attention reaches forward."""
    attention_backward: float = 1.0
    """Share of the peak that fused attention reaches backward."""
    flash: float = 1.0
    """Share of these two that flash-attn reaches, where a job takes it."""
    bandwidth: float = 1.0
    """Share of the device memory's bandwidth, for kernels that mostly move bytes."""
    link: float = 1.0
    """Share of the links within a domain, for collectives."""
    network: float = 1.0
    """Share of the network between domains."""
    kernel_us: float = 0.0
    """Microseconds that every kernel takes besides."""
    host_us: float = 0.0
    """Microseconds that the host needs for one operation of torch, views too, or a collective."""
    module_us: float = 0.0
    """Microseconds that the host needs for a kernel of Transformer Engine's modules or of
    Megatron's fused functions, with the Python around it."""
    exchange_us: float = 0.0
    """Microseconds that the host needs for an exchange of a ring (context parallelism), with the
    step of attention that it is for."""
    collective_us: float = 0.0
    """Microseconds that every collective takes besides."""
    rank_us: float = 0.0
    """Microseconds for each further rank of a collective."""
    step_ms: float = 0.0
    """Milliseconds of a step outside its microbatches, besides collectives and the optimizer."""

    def with_host(self, factor: float) -> Efficiency:
        """These figures with a host that takes `factor` times as long."""
        return (
            self.scaled("host_us", factor).scaled("module_us", factor).scaled("exchange_us", factor)
        )

    def scaled(self, name: str, factor: float) -> Efficiency:
        """These figures with one field times `factor`."""
        return replace(self, **{name: getattr(self, name) * factor})


SHARES = (
    "gemm",
    "gemm_quantised",
    "attention",
    "attention_backward",
    "bandwidth",
    "link",
    "network",
)
"""Fields of `Efficiency` that are shares of a peak."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Rates are peaks, per second."""

    name: str
    capability: float
    """CUDA's compute capability: 9.0 is Hopper, 10.0 and 10.3 are Blackwell."""
    memory_bytes: int
    flops: Mapping[str, float]
    """Peak rates by precision: bf16, fp8, fp4, without precisions that the device lacks."""
    bandwidth_bytes: float
    link_bytes: float
    """Bytes per second in one direction, within a group of `link_domain` GPUs."""
    link_domain: int
    network_bytes: float
    """Bytes per second in one direction, between such groups."""
    source: str
    host_link: HostLink
    """The rate to its node's memory and back while all others copy, too."""
    host_source: str
    l2_bytes: int | None = None
    """`L2_cache_size` of torch's device properties; None: no source found."""
    reaches: Efficiency = Efficiency()
    """What its kernels and links are taken to reach."""
    reached_by: Mapping[str, str] = field(default_factory=dict)
    """Where each field of `reaches` is from: a key of `sources`."""

    @property
    def assumed_of_host(self) -> str:
        """What is assumed of copies to the node's memory, as a sentence."""
        return (
            f"Copies to host memory and back: {self.host_link.to_host_gb_per_s:.3g} GB/s each way "
            f"at once, and {gib(self.host_link.host_bytes)} GiB of host memory per device, "
            f"{USABLE:.0%} of its share of the node ({self.host_source}). They slow nothing else."
        )

    @property
    def needs_fp8_transposes(self) -> bool:
        """Whether fp8 products with one scale per tensor need a transposed copy of a weight: not on
        Blackwell's data-center GPUs (TE pytorch/utils.py `is_non_tn_fp8_gemm_supported`)."""
        return not (10 <= self.capability < 12 or self.capability >= 13)

    def check(self, precision: str) -> None:
        """Raise OptionError for a job's precision that Transformer Engine refuses on this device:
        blocks of 32 need Blackwell (pytorch/quantization.py `check_mxfp8_support`)."""
        if precision == "mxfp8" and self.capability < 10:
            raise OptionError(
                f"{self.name} has no mxfp8 arithmetic; it has {', '.join(self.flops)}. Choose "
                "precision fp8 or fp8_block, or another --gpu."
            )

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
    return {name: _device(name, d) for name, d in _file().items() if name not in _NO_DEVICE}


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


def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("devices.json").read_text()
    )
    return found


def _device(name: str, data: Any) -> Device:
    host, l2, reaches = data["host"], data.get("l2"), data["reaches"]
    rate = host["link"] / host["shared_by"]
    share = round(USABLE * round(host["memory"] * 1e9) / host["gpus"])
    return Device(
        name,
        float(data["capability"]),
        round(data["memory_gib"] * GIB),
        {precision: value * 1e12 for precision, value in data["tflops"].items()},
        data["bandwidth"] * 1e9,
        data["link"] * 1e9,
        data["link_domain"],
        data["network"] * 1e9,
        data["source"],
        HostLink(rate, rate, share),
        host["source"],
        None if l2 is None else round(l2["mib"] * (1 << 20)),
        Efficiency(**{field: float(value) for field, (value, _) in reaches.items()}),
        {field: source for field, (_, source) in reaches.items()},
    )
