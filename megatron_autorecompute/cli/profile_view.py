"""What `estimate` prints: records, static bytes, and assumptions."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import gib


def profile_view(job: Job, profile: Profile, kept_back: str) -> Group:
    """Records, static bytes and assumptions; `kept_back` says what the budget leaves free."""
    modelled = "modelled, not measured"
    if profile.model.facts.get("measured"):
        modelled = "measured where said, else modelled"
    title = f"{job.name}: {profile.num_layers} layers on {job.num_gpus} GPUs; {modelled}"
    return Group(
        Text(title, style="bold"),
        _records(profile),
        _static(profile),
        Text("Assumed:"),
        *(Text(f"- {sentence}") for sentence in profile.assumptions),
        Text(f"- Budget: the device's memory less {kept_back}."),
    )


def _records(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layers", "choice", "held MiB", "fwd +MiB", "bwd +MiB", "fwd ms", "bwd ms"):
        table.add_column(name, justify="left" if name in ("layers", "choice") else "right")
    named = [(f"{len(k.layers)} {k.name}", r) for k in profile.kinds for r in k.choices]
    norm = [("final norm", profile.final_norm)] if profile.final_norm else []
    for name, record in [("embedding", profile.embedding), *named, *norm, ("head", profile.head)]:
        sizes = (
            record.held_bytes,
            record.forward_transient_bytes,
            record.backward_transient_bytes,
        )
        table.add_row(
            name,
            Text(record.choice),  # its brackets are no markup
            *(f"{size / 2**20:.0f}" for size in sizes),
            f"{record.forward_ms:.2f}",
            f"{record.backward_ms:.2f}",
        )
    return table


def _static(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "weights GiB", "gradients", "optimizer", "buffers", "static"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(profile.stages):
        static = stage.static
        parts = (
            static.parameter_bytes,
            static.gradient_bytes,
            static.optimizer_state_bytes,
            static.buffer_bytes,
            static.total_bytes,
        )
        table.add_row(str(number), *map(gib, parts))
    return table
