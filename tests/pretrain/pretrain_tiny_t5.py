"""As pretrain_tiny, with a T5: an encoder and a decoder, whose sequence is shorter.

Built as Megatron-LM's own pretrain_t5.py builds it. Needs --decoder-seq-length besides.
"""

import copy
from collections.abc import Iterator

import torch
from megatron.core.enums import ModelType
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from pretrain_tiny import forward_step, say_weights


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """T5Model.forward's arguments, tokens [b, s] and masks [1, 1, s, s]; the same on every rank."""
    args = get_args()
    size, long, short = args.micro_batch_size, args.seq_length, args.decoder_seq_length
    number = args.consumed_train_samples // size

    def tokens(length):
        return torch.randint(0, args.vocab_size, (size, length), generator=generator)

    while True:
        generator = torch.Generator().manual_seed(number)
        number += 1
        yield {
            "encoder_input_ids": tokens(long),
            "decoder_input_ids": tokens(short),
            "encoder_attn_mask": torch.zeros(1, 1, long, long, dtype=torch.bool),
            "decoder_attn_mask": torch.ones(1, 1, short, short, dtype=torch.bool).triu(1),
            "encoder_decoder_attn_mask": torch.zeros(1, 1, short, long, dtype=torch.bool),
            "lm_labels": tokens(short),
        }


def datasets(_num_samples, vp_stage=None):
    return batches(), batches(), batches()


datasets.is_distributed = True


def t5(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(args.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(args.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
    )


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, t5)
    say_weights(args.rank)
