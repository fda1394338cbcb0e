"""How many layers a policy covers, and which stage holds which, from a config's fields."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.planner.layout import Layout


def num_policy_layers(config: TransformerConfig, encoder_layers: int = 0) -> int:
    """How many layers a policy for this model covers, multi-token-prediction depths included."""
    return encoder_layers + int(config.num_layers) + int(config.mtp_num_layers or 0)


def pipeline_layout(config: TransformerConfig, encoder_layers: int = 0) -> Layout:
    """Which stage and chunk holds which layers, from the config's own fields."""
    given = config.pipeline_model_parallel_layout
    return Layout.from_flags(
        encoder_layers + config.num_layers,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
        mtp_num_layers=config.mtp_num_layers or 0,
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=config.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=config.account_for_loss_in_pipeline_split,
        # Megatron turns the text or list into an object that keeps the original.
        pipeline_model_parallel_layout=getattr(given, "input_data", given),
    )


def counted_chunks(config: TransformerConfig, encoder_layers: int = 0) -> list[list[int]]:
    """Layer indices, without MTP, of the chunks within which block/N and uniform/N count.

    In model order, one list for every pipeline chunk; an encoder's come first.
    """
    chunks = pipeline_layout(config).chunk_layers()
    decoder = [
        [encoder_layers + index for index in chunk if index < config.num_layers] for chunk in chunks
    ]
    return [list(range(encoder_layers)), *decoder] if encoder_layers else decoder
