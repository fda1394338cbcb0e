"""As pretrain_tiny, with a vision tower: a LLaVAModel, built as Megatron-LM's pretrain_vlm.py does.

Its flags and the tower's config, a copy of the decoder's, are that script's. The script itself
needs Transformer Engine: without it the norms of its ViT are torch's, which take no config.
"""

import copy
from collections.abc import Iterator

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from pretrain_tiny import say_weights, seen

SIDE, PATCH, TOKENS = 28, 14, 20


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """LLaVAModel.forward's arguments: images [b, 3, h, w] and text [b, s]; equal on all ranks."""
    args = get_args()
    size, number = args.micro_batch_size, args.consumed_train_samples // args.micro_batch_size
    while True:
        generator = torch.Generator().manual_seed(number)
        number += 1
        tokens = torch.randint(0, args.vocab_size, (size, TOKENS), generator=generator)
        tokens[:, 4] = DEFAULT_IMAGE_TOKEN_INDEX
        length = TOKENS - 1 + (SIDE // PATCH) ** 2
        yield {
            "images": torch.randn(size, 3, SIDE, SIDE, generator=generator),
            "input_ids": tokens,
            "position_ids": torch.arange(TOKENS).repeat(size, 1),
            "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
            "labels": torch.randint(0, args.vocab_size, (size, TOKENS), generator=generator),
            "loss_mask": torch.ones(size, TOKENS),
            "num_image_tiles": torch.ones(size, dtype=torch.int),
        }


def datasets(_num_samples, vp_stage=None):
    return batches(), batches(), batches()


datasets.is_distributed = True


def forward_step(iterator, model):
    seen(model)
    output, mask = model(**next(iterator))

    def loss(per_token):
        total = (per_token.float() * mask).sum()
        count = mask.sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def llava(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    language = core_transformer_config_from_args(args)
    language.num_layers = args.decoder_num_layers
    language.language_model_type = "gpt"
    vision = copy.deepcopy(language)
    vision.num_layers = args.encoder_num_layers
    vision.vision_model_type = "internvit"  # without norms that need Transformer Engine
    vision.pipeline_model_parallel_size = 1
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=args.padded_vocab_size,
        language_max_sequence_length=args.decoder_seq_length,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_gpt_layer_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=copy.deepcopy(language),
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )
    model.freeze(args.freeze_LM, args.freeze_ViT, freeze_vision_projection=False)
    return model


def flags(parser):
    parser.add_argument("--freeze-LM", action="store_true")
    parser.add_argument("--freeze-ViT", action="store_true")
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(
        extra_args_provider=flags, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    config = pretrain_cfg_container_from_args(args)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, llava)
    say_weights(args.rank)
