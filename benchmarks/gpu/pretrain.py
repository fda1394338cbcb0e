"""A Megatron-LM training script of a few lines: a GPT or hybrid on synthetic tokens, CUDA or CPU.

Written against megatron.training 0.19 as its own scripts are, and knowing nothing of this package.
Prints the device's memory at the end. Needs --dataloader-type external.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

allocated: list[int] = []
"""Bytes before every forward."""


def batches() -> Iterator[dict[str, torch.Tensor | None]]:
    """GPTModel.forward's arguments, [b, s] each; goes on where a checkpoint left off."""
    args = get_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (args.micro_batch_size, args.seq_length)
    mask = None  # fused attention masks by itself
    if args.transformer_impl == "local":
        mask = torch.ones(1, 1, shape[1], shape[1], dtype=torch.bool, device=device).triu(1)
    number = args.consumed_train_samples // args.micro_batch_size
    while True:
        generator = torch.Generator().manual_seed(number)
        number += 1
        yield {
            "input_ids": torch.randint(0, args.vocab_size, shape, generator=generator).to(device),
            "position_ids": torch.arange(args.seq_length, device=device).expand(shape),
            "attention_mask": mask,
            "labels": torch.randint(0, args.vocab_size, shape, generator=generator).to(device),
        }


def datasets(_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Megatron's train_valid_test_datasets_provider."""
    return batches(), batches(), batches()


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """Megatron's forward_step_func."""
    if torch.cuda.is_available():
        allocated.append(torch.cuda.memory_allocated())
    output = model(**next(iterator))

    def loss(per_token: torch.Tensor) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        total = per_token.float().sum()
        count = torch.tensor(per_token.numel(), device=per_token.device)
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def print_memory() -> None:
    """What torch allocated at most and before every forward, and what is outside torch."""
    free, total = torch.cuda.mem_get_info()
    print(f"peak allocated bytes: {torch.cuda.max_memory_allocated()}")
    print(f"bytes before every forward: {' '.join(map(str, allocated))}")
    print(f"bytes outside torch: {total - free - torch.cuda.memory_reserved()}", flush=True)


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    model = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    config = pretrain_cfg_container_from_args(args, model(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    if torch.cuda.is_available():
        print_memory()
