"""Replaces modelled records by measured ones, and scales the other modelled times accordingly.

It uses only the two profiles. The user must make sure that both are of the same device: a measured
profile names its device as text, which the result repeats.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.profile import MEASURED, ChoiceRecord, LayerKind, Profile, in_order

LAYER_FIELDS = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("gated_linear_unit", "activation_func", "add_bias_linear", "normalization", "qk_layernorm"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim", "num_moe_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "hidden_dropout"),
    *("attention_dropout", "window_size", "mamba_state_dim", "mamba_head_dim"),
    *("mamba_num_groups", "mamba_num_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    "moe_latent_size",
)
"""Fields of Megatron's config that must be equal for layers to be of one kind."""


def with_measured(profile: Profile, measured: Profile) -> Profile:
    """The profile with the records of `measured`, where kinds are the same layers.

    A kind is the same if shapes, LAYER_FIELDS, precision and its name are equal. Its measured
    records replace the modelled ones. All other times are multiplied by the ratio of measured to
    modelled time over all choices that have both. Only records whose `source` is "measured" count.

    Raises OptionError if nothing is measured, or, with the differences, if no kind is the same.
    """
    kinds = measured_kinds(measured)
    ours, theirs = _facts(profile), _facts(measured)
    differing = [
        f"{name} {theirs[name]!r}, not {ours[name]!r}"
        for name in ours
        if ours[name] != theirs[name]
    ]
    if differing:
        raise OptionError(
            f"--measured: the measured profile is of other layers than {profile.model.name}: "
            f"{'; '.join(differing)}. Measure at the job's own shapes, or leave --measured out."
        )
    found = {(kind.name, record.choice): record for kind in kinds for record in kind.choices}
    common = [
        (record, found[kind.name, record.choice])
        for kind in profile.kinds
        for record in kind.choices
        if (kind.name, record.choice) in found
    ]
    if not common:
        raise OptionError(
            f"--measured: no choice of {', '.join(k.name for k in profile.kinds)} is among the "
            f"measured ones ({', '.join(k.name for k in kinds)}). Leave --measured out."
        )
    forward, backward = (
        sum(getattr(own, name) for _, own in common) / sum(getattr(own, name) for own, _ in common)
        for name in ("forward_ms", "backward_ms")
    )

    def scaled(record: ChoiceRecord) -> ChoiceRecord:
        return replace(
            record,
            forward_ms=record.forward_ms * forward,
            backward_ms=record.backward_ms * backward,
            source="bytes: meta step; times: roofline, scaled by what was measured",
        )

    def merged(kind: LayerKind) -> LayerKind:
        records = [found.get((kind.name, own.choice)) or scaled(own) for own in kind.choices]
        # Scaled times are moved, not measured ones, if a choice would be faster than its part.
        weights = [1e6 if record.source == MEASURED else 1.0 for record in records]
        return replace(kind, choices=in_order(records, weights))

    names = {kind.name: [c for n, c in found if n == kind.name] for kind in profile.kinds}
    counts = [f"{len(choices)} of {name}" for name, choices in names.items() if choices]
    where = measured.fingerprint.get("device", "a device it does not name")
    said = (
        f"Measured on {where}: choices {', '.join(counts)}. All else is modelled: bytes are those "
        f"of a run on meta tensors, times a roofline x {forward:.2f} (forward) and x "
        f"{backward:.2f} (backward), measured over modelled time."
    )
    return replace(
        profile,
        model=replace(profile.model, facts={**profile.model.facts, "measured": True}),
        kinds=tuple(map(merged, profile.kinds)),
        embedding=scaled(profile.embedding),
        head=scaled(profile.head),
        final_norm=profile.final_norm and scaled(profile.final_norm),
        fingerprint={**profile.fingerprint, "measured": measured.fingerprint.get("device", "")},
        assumptions=(said, *profile.assumptions[1:]),
    )


def measured_kinds(profile: Profile) -> list[LayerKind]:
    """The kinds that have measured records, and only those; OptionError if there are none."""
    found = []
    for kind in profile.kinds:
        records = tuple(record for record in kind.choices if record.source == MEASURED)
        if records:
            found.append(replace(kind, choices=records, inert={}))
    if not found:
        sources = sorted({record.source for kind in profile.kinds for record in kind.choices})
        raise OptionError(
            f"--measured: no record of {profile.model.name} there is measured; they come from "
            f"{', '.join(map(repr, sources))}. Give a profile or plan that auto or compare "
            "measured on the device, or leave --measured out."
        )
    return found


def _facts(profile: Profile) -> dict[str, Any]:
    config = profile.model.facts.get("transformer_config")
    if config is None:
        raise OptionError(
            "--measured: model.facts of the profile lack transformer_config, so its layers cannot "
            "be compared with the job's. Profiles measured in a job have it."
        )
    job = profile.model.facts.get("job")
    narrow = job["precision"] != "bf16" if job else bool(config.get("fp8") or config.get("fp4"))
    found = {name: config.get(name) for name in LAYER_FIELDS}
    fields = {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}  # as in JSON
    return {**asdict(profile.parallelism), **fields, "8 or 4 bit": narrow}
