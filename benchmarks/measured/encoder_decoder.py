"""T5 without a device: the bytes of its step, run by Megatron's own schedule on meta tensors.

There is one pipeline stage (`pretrain_t5.py` refuses more), and nothing is planned here: this says
what a run with the job's own setting, without recompute, needs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model

from benchmarks.measured.rounding import StaticBlocks
from benchmarks.measured.stage_need import Need, need_of
from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.attention import with_backend
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.fake_ranks import fake_ranks
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.model import (
    megatron_config,
    meta_megatron,
    step_shape,
)
from megatron_autorecompute.patched import patched

STAND_INS: dict[str, Any] = {
    name: kernels.LAYERS[name]
    for name in (
        "TEColumnParallelLinear",
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TENorm",
        "TERowParallelLinear",
    )
}


def encoder_decoder_need(
    job: Job,
    encoder_layers: int,
    decoder_layers: int,
    decoder_length: int,
    device: Device,
    *,
    expandable: bool = False,
) -> Need:
    """What a T5 job needs; its `seq_length` is the encoder's. expandable: as for `own_need`.

    Raises OptionError for a model that Megatron refuses.
    """
    job = with_backend(job, device)
    shape, meta = step_shape(job, 1), torch.device("meta")
    with meta_megatron(job), contextlib.ExitStack() as undo:
        for name, stand_in in STAND_INS.items():
            undo.enter_context(patched(t5_spec, name, stand_in))
        config = megatron_config(job, {"num_layers": decoder_layers})
        with fake_ranks(config, 0, shape):
            with meta:
                model = _built(job, config, encoder_layers)
            model = model.to(config.params_dtype).train()
            step = _Step(job, decoder_length)
            static = StaticBlocks(job, device, [model], first_stage=True, expandable=expandable)
            return need_of(job, device, static, shape, step)


def _built(job: Job, config: Any, encoder_layers: int) -> torch.nn.Module:
    of_encoder = copy.copy(config)
    of_encoder.num_layers = encoder_layers
    kind = "local" if job.transformer_impl == "local" else "transformer_engine"
    specs = [
        getattr(t5_spec, f"get_t5_{part}_with_{kind}_block_spec")(layers)
        for part, layers in (("encoder", encoder_layers), ("decoder", config.num_layers))
    ]
    model: torch.nn.Module = T5Model(
        config,
        of_encoder,
        *specs,
        vocab_size=job.padded_vocab_size,
        max_sequence_length=job.seq_length,
        share_embeddings_and_output_weights=not job.untie_embeddings_and_output_weights,
        position_embedding_type=job.position_embedding_type,
    )
    return model


class _Step:
    """`forward_step_func` over one batch of tokens; static: tokens, labels and masks."""

    def __init__(self, job: Job, decoder_length: int) -> None:
        batch, lengths = job.micro_batch_size, (job.seq_length, decoder_length)
        with torch.device("meta"):
            self.tokens = [torch.zeros(batch, length, dtype=torch.long) for length in lengths]
            self.labels = torch.zeros(batch, decoder_length, dtype=torch.long)
            encoder, decoder = lengths
            sizes = ((encoder, encoder), (decoder, decoder), (decoder, encoder))
            self.masks = [torch.ones(batch, 1, *size, dtype=torch.bool) for size in sizes]
        self.static = [*self.tokens, self.labels, *self.masks]

    def __call__(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        output = model(*self.tokens, *self.masks, lm_labels=self.labels)
        return output, lambda losses: (losses.float().mean(), {})
