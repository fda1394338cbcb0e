"""One rank's part of a model: its layers, their kinds, and their place in the pipeline."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from megatron_autorecompute.block_names import ENCODER
from megatron_autorecompute.compat import (
    layer_parts,
    model_facts,
    model_layers,
    parallel,
    rules,
    stage_layout,
)
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import FULL, NONE, OWN_MODULES, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Model
from megatron_autorecompute.runtime import ranks
from megatron_autorecompute.runtime.probe import Place
from megatron_autorecompute.work_order import RERUN_WITH

Choices = tuple[LayerPolicy, ...]
Number = TypeVar("Number", int, float)
MAX_CHOICES = 12
"""The most choices measured for one kind of layer; subsets of modules grow as powers of two."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of equal structure and shapes on this rank, and their choices."""

    signature: str
    name: str
    layers: tuple[int, ...]
    choices: tuple[LayerPolicy, ...]
    has_experts: bool


def kinds(
    chunks: Sequence[torch.nn.Module], choices_of: Callable[[torch.nn.Module], Choices]
) -> list[Kind]:
    """The kinds of layers in a rank's chunks, each with the choices that `choices_of` returns."""
    members: dict[str, list[tuple[torch.nn.Module, int]]] = defaultdict(list)
    tower, tower_layers = model_layers.first_block(chunks)
    depths = {
        index: _depth_name(site.mtp.config, index - tower_layers)
        for site in model_layers.mtp_sites(chunks)
        for index in site.indices
    }
    tower = "" if tower == ENCODER else tower  # T5's layers differ in structure
    repeated = {i for s in model_layers.mtp_sites(chunks) if len(s.indices) > 1 for i in s.indices}
    in_front = model_layers.frozen_in_front(chunks)
    features = model_layers.feature_layers(chunks)
    for layer, index in model_layers.numbered_layers(chunks):
        # A multi-token-prediction depth is more than the decoder layer inside it. Each depth is a
        # kind: in backward it meets the gradients of the depths that it feeds.
        # A tower's layers have tokens of their own, and those in front of all that is trained keep
        # nothing.
        place = depths.get(index, "") + tower * (index < tower_layers) + "!" * (index in in_front)
        place += "+" * (index in features)
        members[place + layer_parts.signature(layer)].append((layer, index))
    return [
        Kind(
            signature,
            depths.get(found[0][1])
            or (found[0][1] < tower_layers and tower)
            or layer_parts.kind_name(found[0][0]),
            tuple(index for _, index in found),
            _possible(choices_of(found[0][0]), found[0][1] in features, found[0][1] in repeated),
            layer_parts.has_experts(found[0][0]),
        )
        for signature, found in members.items()
    ]


def _possible(choices: Choices, gives_features: bool, is_repeated: bool) -> Choices:
    """Those of a layer that may be full, and of one that runs for a single depth."""
    return tuple(
        each
        for each in choices
        if not (gives_features and each.granularity == "full") and not (is_repeated and each.own)
    )


def _depth_name(config: Any, index: int) -> str:
    return f"mtp-{index - config.num_layers}" if config.mtp_num_layers > 1 else "mtp"


def choices(
    layer: torch.nn.Module, modules: Sequence[str] | None = None, most: int = MAX_CHOICES
) -> Choices:
    """A layer's choices: none, full, and every set of modules that it has and Megatron allows; of a
    depth with a stack of its own also checkpoints inside it.

    Three sorts of sets are left out: those with a module that lies inside others of the set (`moe`
    contains its experts' activation); where a layer has norms of both sorts, those that rerun the
    fused ones alone; and beyond `most` choices the largest sets.

    Args:
        layer: a built layer of a Megatron model.
        modules: modules to make sets of; by default all that are usable on the layer.
        most: the most choices, `none` and `full` included.
    """
    modules = rules.usable_modules(layer) if modules is None else modules
    parts = layer_parts.worth_keeping(layer)
    sets = (
        combination
        for size in range(1, len(modules) + 1)
        for combination in itertools.combinations(modules, size)
        if not any(set(combination) & set(RERUN_WITH.get(name, ())) for name in combination)
        and all(
            any(layer_parts.scope(layer, m, combination)) for m in combination if m in OWN_MODULES
        )
        and not ("ln_out" in combination and "layernorm" in {*modules}.difference(combination))
    )
    selective = itertools.chain.from_iterable(_with_kept(s, parts) for s in sets)
    full = _checkpoints(layer, parts) if rules.is_allowed(layer.config, FULL) else []
    return (NONE, *full, *itertools.islice(selective, most - 1 - len(full)))


def _checkpoints(layer: torch.nn.Module, parts: Sequence[str]) -> list[LayerPolicy]:
    """Full, and with each set of kept parts; of a depth with a stack of its own also what
    Megatron's block/N and uniform/1 do."""
    size = model_layers.stack_size(layer)
    inner = [LayerPolicy("inner", inner=n) for n in range(1, size + 1)]
    if size:
        return [FULL, *inner, LayerPolicy("full", inner=size)]
    kept = (itertools.combinations(parts, n) for n in range(len(parts) + 1))
    return [LayerPolicy("full", keep=keep) for keep in itertools.chain.from_iterable(kept)]


def megatrons(choices_of: Callable[[torch.nn.Module], Choices], layer: torch.nn.Module) -> Choices:
    """A layer's choices that Megatron's own checkpoints have, as they run them."""
    return tuple(choice.as_megatron for choice in choices_of(layer) if not choice.own)


def _with_kept(modules: tuple[str, ...], parts: Sequence[str]) -> Iterator[LayerPolicy]:
    yield LayerPolicy("selective", modules)
    if "moe" in modules and "dispatch" in parts:
        yield LayerPolicy("selective", modules, keep=("dispatch",))


def merged(by_rank: list[list[Kind]]) -> list[Kind]:
    """The kinds of the whole model, in the order of their first layer, with distinct names."""
    merged: dict[str, Kind] = {}
    for kind in itertools.chain.from_iterable(by_rank):
        layers = set(kind.layers) | set(
            merged[kind.signature].layers if kind.signature in merged else ()
        )
        merged[kind.signature] = replace(kind, layers=tuple(sorted(layers)))
    ordered = sorted(merged.values(), key=lambda kind: kind.layers)
    names = [kind.name for kind in ordered]
    return [
        kind if names.count(kind.name) == 1 else replace(kind, name=f"{kind.name}-{number}")
        for number, kind in enumerate(ordered)
    ]


class ModelShard:
    """One rank's chunks of a model, and facts about the whole model, gathered from all ranks.

    Every rank must make one at the same time, because they exchange which layers they have.

    Args:
        chunks: this rank's model chunks, wrapped (DDP, Float16Module) or bare.
        all_gather: collects a value from every rank, in rank order; `alone` for a single process.
        choices_of: the choices of a layer that are to be measured.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        *,
        all_gather: Callable[[Any], list[Any]] = ranks.all_gather,
        choices_of: Callable[[torch.nn.Module], Choices] = choices,
    ) -> None:
        self.chunks = list(chunks)
        model = model_layers.unwrapped(self.chunks[0])
        self.config = model.config
        self.pattern = stage_layout.pattern_of(model)
        """The pattern of a HybridModel."""
        self.first_block, self.encoder_layers = model_layers.first_block(self.chunks)
        self.num_layers = stage_layout.num_policy_layers(self.config, self.encoder_layers)
        """Layers of the whole model that a policy covers, with encoder and MTP depths."""
        self.stage = parallel.pipeline_rank()
        self.all_gather = all_gather
        self.own_kinds = kinds(self.chunks, choices_of)
        by_rank = all_gather((self.stage, self.own_kinds))
        self.kinds = merged([own for _, own in by_rank])
        """The kinds of the whole model."""
        self.stage_of = {
            index: stage for stage, own in by_rank for kind in own for index in kind.layers
        }
        """Pipeline stage of every layer."""
        self.signatures = {index: one.signature for one in self.own_kinds for index in one.layers}
        """The signature of every layer of this rank."""

    @property
    def may_offload(self) -> frozenset[int]:
        """Layers of this rank with choices that offload."""
        moved = (kind for kind in self.own_kinds if any(c.offload for c in kind.choices))
        return frozenset(index for kind in moved for index in kind.layers)

    @cached_property
    def layout(self) -> Layout:
        """The layers of every stage's chunks."""
        return stage_layout.pipeline_layout(self.config, self.encoder_layers, self.pattern)

    def by_stage(
        self, mine: Number, together: Callable[[list[Number]], Number]
    ) -> tuple[Number, ...]:
        """A figure for every stage, combined over its ranks; every rank must call it."""
        found: dict[int, list[Number]] = {}
        for stage, value in self.all_gather((self.stage, mine)):
            found.setdefault(stage, []).append(value)
        return tuple(together(found[stage]) for stage in sorted(found))

    def schedule(self, num_microbatches: int) -> Schedule:
        """Megatron's schedule for a step of `num_microbatches`."""
        several = len(self.chunks) > 1
        return Schedule(
            parallel.pipeline_size(),
            len(self.chunks),
            num_microbatches,
            self.config.microbatch_group_size_per_vp_stage if several else None,
            bool(self.config.overlap_moe_expert_parallel_comm),
        )

    def model(self) -> Model:
        """The whole model's description for a profile."""
        return Model(
            type(model_layers.unwrapped(self.chunks[0])).__name__,
            self.encoder_layers + self.config.num_layers,
            int(self.config.mtp_num_layers or 0),
            self.encoder_layers,
            facts=max(self.all_gather(model_facts.of_model(self.chunks)), key=len),
            encoder_name=self.first_block or ENCODER,
        )

    def leanest(self) -> RecomputePolicy:
        """Every layer at full, or at its largest set of modules if Megatron refuses full."""
        layers = [NONE] * self.num_layers
        for kind in self.kinds:
            plain = [choice for choice in kind.choices if not choice.offload]
            whole = [each for each in (FULL, FULL.as_megatron) if each in plain]
            choice = whole[0] if whole else plain[-1]
            for index in kind.layers:
                layers[index] = choice
        return RecomputePolicy(tuple(layers))

    def has(self, chunk: int, place: Place) -> bool:
        """Whether a chunk really has this place: an embedding, a layer, a head.

        False for "output", the boundary after everything. If the model's output is also the head's
        input, the mark of its gradient still belongs to the forward pass.
        """
        if place == "output":
            return False
        model: Any = model_layers.unwrapped(self.chunks[chunk])
        if place == "embedding":
            return bool(model.pre_process)
        # "between" occurs only with encoder and decoder, "final_norm" only where the norm is.
        return place != "head" or bool(model.post_process)


def alone(mine: Any) -> list[Any]:
    """`all_gather` for a single process, without other ranks."""
    return [mine]
