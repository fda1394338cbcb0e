"""How many layers a policy covers, and which stage holds which: from a config, or a pattern.

Megatron keeps a HybridModel's pattern in the model and not in its config; Bridge's providers are
configs that have it; in a job of Megatron-LM `note_pattern` writes it into the config.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.block_names import DECODER
from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.policy import RecomputePolicy

_NOTED = "_autorecompute_pattern"
_PATTERN_NAMES = ("hybrid_layer_pattern", "hybrid_override_pattern", _NOTED)
"""Of models and providers, the second one before 0.18; the last one is what `note_pattern` sets,
because Megatron's HybridModelConfig hands every name that its TransformerConfig has to that one."""


def pattern_of(holder: Any) -> HybridPattern | None:
    """The pattern of a model or config that has one.

    Raises PipelineError for a pattern that Megatron does not build, or that does not match the
    config's num_layers and mtp_num_layers.
    """
    config = getattr(holder, "config", holder)
    text = _text_of(holder, config)
    if text is None:
        return None
    pattern = HybridPattern.parse(text)
    # Bridge's providers set num_layers from the pattern when they are finalised.
    num_layers = pattern.num_layers if config.num_layers is None else int(config.num_layers)
    return pattern.check_numbers(num_layers, int(config.mtp_num_layers or 0))


def _text_of(holder: Any, config: TransformerConfig) -> str | None:
    texts = (getattr(one, name, None) for one in (holder, config) for name in _PATTERN_NAMES)
    text = next((text for text in texts if isinstance(text, str)), None)
    depth = getattr(holder, "mtp_hybrid_override_pattern", None)
    if text is None or not isinstance(depth, str):
        return text
    # Bridge's configs append the depths when they are finalised.
    return "/".join([text.partition("/")[0], *[depth] * int(config.mtp_num_layers or 0)])


def note_pattern(config: TransformerConfig, text: str | None) -> None:
    """Make a config say the pattern of the model that is built from it."""
    if text is not None:
        vars(config)[_NOTED] = text


def transformer_config(model_config: Any) -> Any:
    """The config that layers are built from, which says the pattern: a provider of Bridge itself,
    or what is inside a ModelConfig (of Megatron since 0.18, of Bridge since 0.4)."""
    config = vars(model_config).get("transformer", model_config)
    if config is not model_config:
        note_pattern(config, _text_of(model_config, config))
    return config


def lacks_pattern(config: TransformerConfig) -> bool:
    """Whether the config is of a hybrid model, and only the model knows the pattern."""
    return bool(getattr(config, "is_hybrid_model", False)) and pattern_of(config) is None


def num_policy_layers(config: TransformerConfig, encoder_layers: int = 0) -> int:
    """How many layers a policy for this model covers, multi-token-prediction depths included."""
    pattern = pattern_of(config) if config.num_layers is None else None
    decoder = int(config.num_layers) if pattern is None else pattern.num_layers
    return encoder_layers + decoder + int(config.mtp_num_layers or 0)


def named_blocks(num_layers: int, first: str, first_layers: int) -> dict[str, int]:
    """The blocks of a model in the order of a policy, which covers `num_layers`, with their layers;
    `first` is the name of the block in front of the decoder, empty if there is none."""
    decoder = {DECODER: num_layers - first_layers}
    return {first: first_layers, **decoder} if first else decoder


def read_policy(
    value: Any,
    config: TransformerConfig,
    first: str = "",
    first_layers: int = 0,
    pattern: HybridPattern | None = None,
) -> RecomputePolicy:
    """The policy that a config field's value says for a model, whose decoder has this config; the
    others as `RecomputePolicy.from_config`, `named_blocks` and `pipeline_layout` take them."""
    num_layers = num_policy_layers(config, first_layers)
    try:
        chunks = counted_chunks(config, first_layers, pattern)
    except PipelineError:
        if pattern is not None or not lacks_pattern(config):
            raise
        chunks = [list(range(config.num_layers))]  # enough to check the choices
    return RecomputePolicy.from_config(
        value,
        num_layers=num_layers,
        layout=chunks,
        depth_layers=depth_layers(config, pattern),
        blocks=named_blocks(num_layers, first, first_layers),
    )


def depth_layers(config: TransformerConfig, pattern: HybridPattern | None = None) -> int:
    """Layers of the stack inside each multi-token-prediction depth; 0 without such stacks.

    pattern: as `pipeline_layout` takes it.
    """
    pattern = pattern or pattern_of(config)
    return 0 if pattern is None else len(pattern.depth)


def pipeline_layout(
    config: TransformerConfig, encoder_layers: int = 0, pattern: HybridPattern | None = None
) -> Layout:
    """Which stage and chunk holds which layers, from the pattern, or else the config's fields.

    encoder_layers: of an encoder or a tower; the first chunk has them in front of its own.
    pattern: the model's; by default the config's, if it has one.
    """
    return Layout.of_config(config, pattern or pattern_of(config)).behind(encoder_layers)


def counted_chunks(
    config: TransformerConfig, encoder_layers: int = 0, pattern: HybridPattern | None = None
) -> list[list[int]]:
    """Layer indices, without MTP, of the chunks within which block/N and uniform/N count.

    In model order, one list for every pipeline chunk; an encoder's come first. Arguments are those
    of `pipeline_layout`.
    """
    layout = pipeline_layout(config, pattern=pattern)
    decoder = [[encoder_layers + index for index in chunk] for chunk in layout.counted_chunks()]
    return [list(range(encoder_layers)), *decoder] if encoder_layers else decoder
