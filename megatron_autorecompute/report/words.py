"""Formats numbers, proofs and choices of a plan, with the same words on every page."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_autorecompute.planner.cost.two_clocks import knows_host
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.planner.search.solution import nearness
from megatron_autorecompute.policy import FULL, NONE
from megatron_autorecompute.profile import MEASURED, MEASURED_ON_ONE_DEVICE, Profile
from megatron_autorecompute.units import GIB, MIB


def size(size_bytes: float) -> str:
    """Bytes in GiB, or in MiB if it is less than one GiB."""
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:,.2f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def duration(time_ms: float) -> str:
    """Time in ms, or in s from ten seconds on, with three significant digits."""
    value, unit = (time_ms / 1000, "s") if abs(time_ms) >= 1000 else (time_ms, "ms")
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def by_room(plan: Plan) -> list[int]:
    """The stages, those with the least room under their budget first."""
    pairs = zip(plan.budget_bytes, plan.cost.stages, strict=True)
    room = [budget - cost.peak_high_bytes for budget, cost in pairs]
    return sorted(range(len(room)), key=room.__getitem__)


HELPS = "CUDA graphs or a larger micro-batch help; a choice costs what its launches take."
"""A host-bound job."""


def binds(plan: Plan) -> str:
    """Whether the host or the device decides the step, and what helps; empty where the host's times
    are not known."""
    if not knows_host(plan.profile):
        return ""
    if not plan.cost.is_host_bound:
        return "Device-bound: the host launches kernels ahead of the device."
    launch_ms, share = plan.cost.launch_ms, plan.cost.launch_ms / plan.cost.step_ms
    return (
        f"Host-bound: for {duration(launch_ms)} of the step ({share:.1%}) the device waits "
        f"for the host to launch its kernels. {HELPS}"
    )


def clocks(profile: Profile) -> Iterator[str]:
    """A sentence for `none` and for `full` on all layers: what a microbatch takes either clock."""
    for choice in (NONE, FULL):
        found = [(len(kind.layers), kind.record(choice)) for kind in profile.kinds]
        both = [(n, r, r.host) for n, r in found if r is not None and r.host is not None]
        if len(both) == len(found):
            device_ms = sum(n * (r.forward_ms + r.backward_ms) for n, r, _ in both)
            host_ms = sum(n * (h.forward_ms + h.backward_ms) for n, _, h in both)
            yield (
                f"{choice} on all layers takes the device {duration(device_ms)} a microbatch, and "
                f"the host {duration(host_ms)} to launch: "
                + (f"host-bound. {HELPS}" if host_ms > device_ms else "device-bound.")
            )


def came_from(profile: Profile) -> str:
    """Whether the figures of a profile are measured."""
    sources = {record.source for kind in profile.kinds for record in kind.choices}
    if sources == {MEASURED}:
        return "measured"
    if MEASURED_ON_ONE_DEVICE in sources:
        return "measured on one device, communication modelled"
    return "measured where said, else modelled" if MEASURED in sources else "modelled, not measured"


def proof(plan: Plan) -> str:
    """What the plan's own bound says of its step; see docs/plan.md."""
    gap = plan.step_evidence.gap
    if gap is None or not plan.proven:
        return (
            "Not proven: the file was changed after it was written, or another version of this "
            "program wrote it. plan --profile with this file solves it again."
        )
    what = "make it shorter by more" if gap else "make a shorter one"
    return (
        f"The step is proven {nearness(gap)} in this model: no choices that fit the budget {what}."
    )
