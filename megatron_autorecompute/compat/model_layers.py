"""Which layers a model has, in blocks and in multi-token prediction, and their global indices.

Indices are 0-based here as everywhere. Only this file converts Megatron's 1-based `layer_number`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_autorecompute.block_names import DECODER, ENCODER
from megatron_autorecompute.compat import parallel, seam
from megatron_autorecompute.compat.untyped import Block, Chunk, Layer
from megatron_autorecompute.errors import PolicyError


@dataclass(frozen=True, slots=True)
class BlockSite:
    """A block of layers and their global indices."""

    block: Block
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MtpSite:
    """A multi-token-prediction layer, the layer or stack inside it, and the depths it runs for."""

    mtp: Layer
    layer: Layer
    indices: tuple[int, ...]
    """Depth d has index num_layers + d. Several with mtp_use_repeated_layer, in order."""


def _block_types() -> tuple[type, ...]:
    if seam.is_method():
        return (TransformerBlock,)
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    return (TransformerBlock, HybridStack)


def constructed_types() -> tuple[type, ...]:
    """The classes whose instances a policy applies to once they are built."""
    return (*_block_types(), MultiTokenPredictionLayer)


def pattern_types() -> tuple[type, ...]:
    """The models that are built from a pattern and whose blocks a policy applies to."""
    if seam.is_method():
        return ()
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return (HybridModel,)


def nested_layers(layer: Layer) -> tuple[Layer, ...]:
    """The layers of a depth's own stack (HybridModel); of any other layer, itself."""
    stack: Any = layer
    return tuple(stack.layers) if isinstance(layer, _block_types()) else (layer,)


def stack_size(layer: Layer) -> int:
    """How many layers the stack of a depth has (HybridModel); 0 for any other layer."""
    return len(nested_layers(layer)) if isinstance(layer, _block_types()) else 0


def is_inside_depth(block: Block) -> bool:
    """Whether the block is the stack inside a multi-token-prediction depth: the choice is its."""
    return bool(getattr(block, "is_mtp_layer", False))


def block_sites(modules: Iterable[Chunk]) -> list[BlockSite]:
    """Every block of layers below `modules` (model chunks, wrapped or bare), a tower or an encoder
    before the decoder, whose indices follow the other's.

    Raises PolicyError: as `first_block`; or a layer stands twice in a block; or blocks have equal
    layer numbers and no names of their own.
    """
    chunks = list(modules)
    _, in_front = first_block(chunks)
    first, rest = [], []
    for path, block in _blocks(chunks):
        _check_used_once(block)
        numbers = [layer.layer_number - 1 for layer in block.layers]
        if in_front and _name(path) != DECODER:
            first.append(BlockSite(block, tuple(numbers)))
        else:
            rest.append(BlockSite(block, tuple(in_front + number for number in numbers)))
    indices = [index for site in first + rest for index in site.layers]
    if len(set(indices)) != len(indices):
        names = ", ".join(path or "the model" for path, _ in _blocks(chunks))
        raise PolicyError(
            f"Blocks of this model have the same layer numbers: {names}. A policy covers a decoder "
            "and one tower or encoder: apply a separate policy to each block, as in "
            "apply(policy, model.decoder)."
        )
    return first + rest


def _check_used_once(block: Block) -> None:
    where: dict[int, int] = {}
    for index, layer in enumerate(block.layers):
        if (first := where.setdefault(id(layer), index)) != index:
            raise PolicyError(
                f"Layers {first} and {index} of a block are one module. A policy sets modules, so "
                "these two cannot have choices of their own: give each its module, which may share "
                "its weights with the other."
            )


def _blocks(chunks: Iterable[Chunk]) -> list[tuple[str, Block]]:
    """Every block that a policy applies to, with its path in its chunk."""
    return [
        (path, module)
        for chunk in chunks
        for path, module in unwrapped(chunk).named_modules()
        if isinstance(module, _block_types()) and not is_inside_depth(module)
    ]


def _name(path: str) -> str:
    """What a policy calls the block at this path of a model: `vision_model.decoder` is vision."""
    parts = path.split(".")
    if "language_model" in parts or path in ("", "decoder"):
        return DECODER
    owner = parts[-2] if len(parts) > 1 else parts[0]
    return owner.removesuffix("_model").removesuffix("_tower").removesuffix("_encoder")


_T5 = "T5Model"
_FIRST_BLOCK = "_autorecompute_first_block"
"""Attribute in which a chunk of a model on several stages keeps what `first_block` found."""


def first_block(chunks: Iterable[Chunk]) -> tuple[str, int]:
    """Name and layers of the block in front of the decoder: `encoder` of T5, a tower such as
    `vision`. ("", 0) for a model that has none.

    A tower is on the first pipeline stage, and the others do not see it. So for a model that may
    have one, all ranks ask for the first time together; from then on the chunks know.

    Raises PolicyError, the same on all ranks, on several stages for a model with an encoder, or
    whose blocks no policy can cover.
    """
    models = [unwrapped(chunk) for chunk in chunks]
    if parallel.pipeline_size() == 1 or all(map(_is_one_block, models)):
        return _seen_in_front(models)
    if not all(_FIRST_BLOCK in vars(model) for model in models):
        names = [[_name(path) for path, _ in _blocks([model])] for model in models]
        t5 = any(type(model).__name__ == _T5 for model in models)
        stages, encoders, found = zip(
            *parallel.over_stages((names, t5, _seen_in_front(models))), strict=True
        )
        if any(encoders) or not _can_be_split(stages):
            shown = "; ".join(
                ", ".join(name for chunk in stage for name in chunk) or "none" for stage in stages
            )
            raise PolicyError(
                f"A {type(models[0]).__name__} on {len(stages)} pipeline stages, whose blocks are "
                f"by stage: {shown}. A policy needs a decoder on every stage, at most a vision "
                "tower on the first one beside it, and an encoder (T5) with its decoder on one "
                "stage, pipeline_model_parallel_size=1, as does Megatron's pretrain_t5.py."
            )
        for model in models:
            vars(model)[_FIRST_BLOCK] = max(found, key=lambda each: each[1])
    known: tuple[str, int] = vars(models[0])[_FIRST_BLOCK]
    return known


def _is_one_block(model: Chunk) -> bool:
    """Whether nothing can be in front of the only block. What is given at construction is always
    one, for a constructor must not wait for other ranks."""
    if isinstance(model, MultiTokenPredictionLayer):
        return True
    paths = [path for path, _ in _blocks([model])]
    return len(paths) == 1 and "." not in paths[0] and type(model).__name__ != _T5


def _seen_in_front(models: Iterable[Chunk]) -> tuple[str, int]:
    """What `first_block` says, as far as these chunks show."""
    for model in models:
        blocks = [(_name(path), len(block.layers)) for path, block in _blocks([model])]
        rest = [each for each in blocks if each[0] != DECODER]
        if len(rest) == 1 and len(blocks) == 2:
            return rest[0]
    return "", 0


def _can_be_split(stages: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether a policy can run on several stages whose chunks have blocks of these names: one block
    on each, or a decoder on each and one more on the first stage."""
    (first, *others), later = stages[0], [chunk for stage in stages[1:] for chunk in stage]
    every = [chunk for chunk in (first, *others, *later) if chunk]
    if any(len(chunk) > 1 for chunk in (*others, *later)) or len(first) > 2:
        return False
    return len({name for chunk in every for name in chunk}) < 2 or all(
        DECODER in chunk for chunk in every
    )


def tower_layers(chunks: Iterable[Chunk]) -> int:
    """How many layers, of tokens of their own, a tower has before the decoder; else 0."""
    name, layers = first_block(chunks)
    return 0 if name == ENCODER else layers


def ties_weights(chunk: Chunk) -> bool:
    """Whether a decoder's chunk has both ends of the model, with the same weights."""
    model: Any = unwrapped(chunk)
    ends = model.pre_process and model.post_process and not first_block([chunk])[1]
    return bool(ends and model.share_embeddings_and_output_weights)


def mtp_sites(modules: Iterable[Chunk]) -> list[MtpSite]:
    """Every multi-token-prediction layer below `modules`. Depths come after the decoder's layers.
    The inner layer is `transformer_layer` in 0.16 and `mtp_model_layer` since 0.17, where it is
    numbered from 1 again."""
    chunks = list(modules)
    in_front, found = first_block(chunks)[1], list[MtpSite]()
    for mtp in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(mtp, MultiTokenPredictionLayer):
            layer = getattr(mtp, "mtp_model_layer", None) or mtp.transformer_layer
            first = in_front + mtp.config.num_layers + mtp.layer_number - 1
            repeated = getattr(mtp.config, "mtp_use_repeated_layer", False)  # since 0.18
            depths = mtp.config.mtp_num_layers if repeated else 1
            found.append(MtpSite(mtp, layer, tuple(range(first, first + depths))))
    return found


def frozen_in_front(chunks: Iterable[Chunk]) -> set[int]:
    """Indices of the layers that are frozen, with all that runs before them: no gradient reaches
    them, and nothing of them is kept. A later stage's input has a gradient."""
    if parallel.pipeline_rank():
        return set()
    chunk = next(iter(chunks))
    parameters = dict(unwrapped(chunk).named_parameters())
    paths = {id(block): path for path, block in _blocks([chunk])}
    later = [path for path in paths.values() if path] + ["output_layer", "lm_head", "mtp"]
    found: set[int] = set()
    for site in block_sites([chunk]):
        path = paths[id(site.block)]
        tower = path.rpartition(".")[0] if _name(path) != DECODER else ""
        before = [
            parameter
            for name, parameter in parameters.items()
            if name.startswith(tower) and not any(f"{part}." in name for part in later)
        ]
        if any(parameter.requires_grad for parameter in before):
            break
        for layer, index in zip(site.block.layers, site.layers, strict=True):
            if any(parameter.requires_grad for parameter in layer.parameters()):
                return found
            found.add(index)
    return found


def feature_layers(chunks: Iterable[Chunk]) -> set[int]:
    """Indices of the layers whose output leaves the block as a feature, too. A checkpoint around
    such a layer gives the features no gradient, because it returns them in a list (Qwen3-VL's tower
    in Megatron Bridge's main of August 2026, `_checkpointed_forward`)."""
    return {
        site.layers[place]
        for site in block_sites(chunks)
        for place in getattr(site.block, "deepstack_visual_indexes", ())
    }


def numbered_layers(chunks: Iterable[Chunk]) -> list[tuple[Layer, int]]:
    """Every single layer of these model chunks with its global index.

    A layer that runs for several depths (mtp_use_repeated_layer) comes once for each."""
    chunks = list(chunks)
    pairs = [p for s in block_sites(chunks) for p in zip(s.block.layers, s.layers, strict=True)]
    depths = [(site.layer, index) for site in mtp_sites(chunks) for index in site.indices]
    return pairs + depths


def unwrapped(chunk: Chunk) -> Chunk:
    """The model inside DistributedDataParallel, Float16Module and their like."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def final_norm(block: Block) -> torch.nn.Module | None:
    """The norm after the last layer: `final_layernorm`, or `final_norm` of a HybridStack."""
    return getattr(block, "final_layernorm", None) or getattr(block, "final_norm", None)
