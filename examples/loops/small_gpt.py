"""A small GPT for the loops in this folder: one rank's chunks, an optimizer, packed microbatches.

It stands for what a framework has built before its training loop begins. Runs on CPU with gloo and
on GPUs with NCCL. Attention keeps no tensor of tokens x tokens, as flash attention does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.meta import without_cuda

VOCABULARY = 512
MAX_TOKENS = 256


@contextmanager
def started() -> Iterator[None]:
    """This rank's part of what torchrun starts; Megatron asks for CUDA, and gets by without."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        without_cuda.activate()
        torch.set_num_threads(1)  # several would wait for each other longer than they work
    torch.distributed.init_process_group()
    yield
    torch.distributed.destroy_process_group()


class Attention(torch.nn.Module):
    """Torch's scaled dot product attention in the place of Megatron's core attention."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """[tokens, batch, heads, size] each, to [tokens, batch, heads * size]."""
        sequence, batch, heads, size = query.shape
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, heads * size)


@dataclass
class SmallGPT:
    """Model chunks and optimizer of one rank.

    Args:
        pp: pipeline stages.
        vpp: model chunks of a stage; None for one.
        ep: expert parallel ranks; above 1 the layers have experts.
        fields: further fields of the TransformerConfig.
        attention: the core attention.
    """

    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    layers: int = 6
    fields: dict[str, Any] | None = None
    attention: type[Attention] = Attention

    def __post_init__(self) -> None:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=self.pp,
                virtual_pipeline_model_parallel_size=self.vpp,
                expert_model_parallel_size=self.ep,
            )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        torch.manual_seed(1)
        self.config = self._config()
        self.chunks = [self._chunk(number) for number in range(self.vpp or 1)]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, params_dtype=torch.float32), self.chunks
        )
        self.config.finalize_model_grads_func = finalize_model_grads

    def _config(self) -> TransformerConfig:
        experts: dict[str, Any] = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 64,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "expert_model_parallel_size": self.ep,
        }
        several: dict[str, Any] = {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": False}
        return TransformerConfig(
            **{
                "num_layers": self.layers,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.1,
                "add_bias_linear": False,
                "use_cpu_initialization": True,
                "pipeline_dtype": torch.float32,
                "batch_p2p_comm": False,
                "deallocate_pipeline_outputs": True,
                "pipeline_model_parallel_size": self.pp,
                "virtual_pipeline_model_parallel_size": self.vpp,
                "moe_token_dispatcher_type": "alltoall",
                "variable_seq_lengths": True,
                **(several if self.vpp else {}),
                **(experts if self.ep > 1 else {}),
                **(self.fields or {}),
            }
        )

    def _chunk(self, number: int) -> torch.nn.Module:
        spec = get_gpt_layer_local_spec(num_experts=self.config.num_moe_experts)
        spec.submodules.self_attention.submodules.core_attention = self.attention
        where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": number} if self.vpp else {}
        model = GPTModel(
            self.config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=MAX_TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=False,
            **({"vp_stage": number} if self.vpp else {}),
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        ddp = DistributedDataParallelConfig()
        return DistributedDataParallel(self.config, ddp, model.to(device)).train()

    # --- data -------------------------------------------------------------------------------------

    def microbatches(self, lengths: Sequence[int], seed: int) -> list[dict[str, torch.Tensor]]:
        """A sequence [1, tokens] for each length, with targets."""
        random_ids = torch.Generator().manual_seed(seed)
        device = next(self.chunks[0].parameters()).device

        def one(tokens: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, VOCABULARY, (2, 1, tokens), generator=random_ids).to(device)
            return {"input_ids": ids[0], "target": ids[1]}

        return [one(tokens) for tokens in lengths]

    # --- one call of Megatron's schedule ----------------------------------------------------------

    def call(
        self, microbatches: Sequence[dict[str, torch.Tensor]], forward_backward: Any, **named: Any
    ) -> list[Any]:
        """Forward, and unless forward_only backward, of all microbatches."""
        iterators = [iter(microbatches) for _ in self.chunks]
        found: list[Any] = forward_backward(
            forward_step_func=named.pop("forward_step", forward_step),
            data_iterator=iterators if self.vpp else iterators[0],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=1,  # with variable_seq_lengths shapes travel with the tensors
            micro_batch_size=1,
            **{"forward_only": False, **named},
        )
        return found

    def zero_grad(self) -> None:
        """Before an update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    """What RL frameworks do: the model gives logits, and the loss is computed outside of it."""
    batch = next(iterator)
    ids, target = batch["input_ids"], batch["target"]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    logits = model(input_ids=ids, position_ids=positions, attention_mask=None)

    def loss_function(logits: torch.Tensor) -> Any:
        logits = logits.float()
        probabilities = torch.softmax(logits, -1)
        entropy = torch.logsumexp(logits, -1) - (probabilities * logits).sum(-1)
        log_probs = torch.log_softmax(logits.clone(), -1).gather(-1, target[..., None])
        loss = -log_probs.mean() - 0.01 * entropy.mean()
        return loss, {"loss": loss.detach()}

    return logits, loss_function


__all__ = ["SmallGPT", "forward_step", "get_forward_backward_func", "started"]
