"""Which choices Megatron refuses beside a job's CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from megatron_autorecompute.compat import rules
from megatron_autorecompute.compat.graph_fields import graph_fields
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.meta.graph_scope import FIELDS
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.model import (
    LEFT_OUT,
    job_kinds,
    meta_megatron,
    shard_config,
)
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import LayerKind


def with_graph_fields(job: Job, implementation: str) -> tuple[Job, dict[str, Any]]:
    """The job with its CUDA graphs in fields of the installed Megatron's config, by an
    implementation, and what of LEFT_OUT is left out of it all the same."""
    fields = graph_fields(implementation, job.graphs.modules)
    rest = {name: value for name, value in job.config.items() if name not in FIELDS}
    left_out = {name: value for name, value in LEFT_OUT.items() if name not in fields}
    return replace(job, config={**rest, **fields}), left_out


def without_refused(
    job: Job, kinds: Sequence[LayerKind]
) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    """The kinds with those choices alone that Megatron allows beside the job's CUDA graphs, and a
    sentence for each of its reasons against others.

    Raises OptionError if Megatron refuses these graphs of the model, whatever is recomputed.
    """
    choices = list(dict.fromkeys(record.policy for kind in kinds for record in kind.choices))
    with meta_megatron(job):
        asked, left_out = with_graph_fields(job, job.graphs.implementation)
        config, _ = shard_config(asked, [1] * len(job_kinds(job)), left_out)
        refused = {choice: reason for choice in choices if (reason := _reason(config, choice))}
    if not refused:
        return tuple(kinds), ()
    kept = tuple(_without(kind, refused) for kind in kinds)
    named: dict[str, list[str]] = {}
    for choice, reason in refused.items():
        smaller = any(other.modules and {*other.modules} < {*choice.modules} for other in refused)
        if not smaller:
            named.setdefault(reason, []).append(str(choice))
    said = tuple(f"Left out: {', '.join(texts)}. {reason}" for reason, texts in named.items())
    return kept, said


def _without(kind: LayerKind, refused: Collection[LayerPolicy]) -> LayerKind:
    choices = tuple(record for record in kind.choices if record.policy not in refused)
    known = {record.choice for record in choices}
    inert = {choice: other for choice, other in kind.inert.items() if other in known}
    return replace(kind, choices=choices, inert=inert)


def _reason(config: Any, choice: LayerPolicy) -> str | None:
    try:
        rules.check_allowed(config, RecomputePolicy((choice,) * choice.group))
    except PolicyError as error:
        return " ".join(str(error).split())
    return None
