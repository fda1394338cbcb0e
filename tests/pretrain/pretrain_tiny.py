"""A Megatron-LM training script of a few lines, for tests: a GPT on synthetic tokens.

Written against megatron.training 0.19 as its own scripts are; it knows nothing of this package.
After training every rank prints a digest of its weights. Needs --dataloader-type external.
"""

import hashlib
import os
import sys
from collections.abc import Iterator

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

chunks = {}


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """GPTModel.forward's arguments, [b, s] each; the same on every rank; goes on at a restart."""
    args = get_args()
    shape = (args.micro_batch_size, args.seq_length)
    number = args.consumed_train_samples // args.micro_batch_size
    while True:
        generator = torch.Generator().manual_seed(number)
        number += 1
        yield {
            "input_ids": torch.randint(0, args.vocab_size, shape, generator=generator),
            "position_ids": torch.arange(args.seq_length).expand(shape),
            "attention_mask": torch.ones(1, 1, shape[1], shape[1], dtype=torch.bool).triu(1),
            "labels": torch.randint(0, args.vocab_size, shape, generator=generator),
        }


def datasets(_num_samples, vp_stage=None):
    return batches(), batches(), batches()


datasets.is_distributed = True


def seen(model):
    """Remember a chunk for the digest of weights."""
    chunks[id(model)] = model


def forward_step(iterator, model):
    seen(model)
    output = model(**next(iterator))

    def loss(per_token):
        total, count = per_token.float().sum(), torch.tensor(per_token.numel())
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def weights_digest() -> str:
    digest = hashlib.sha256()
    for chunk in chunks.values():
        for parameter in chunk.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


def say_weights(rank: int) -> None:
    """In one write: lines of several ranks that are printed run into each other."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"\nweights of rank {rank}: {weights_digest()}\n".encode())


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    say_weights(args.rank)
