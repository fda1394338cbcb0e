"""Tiny HybridModels of Megatron's local layers, for ranks without CUDA and Transformer Engine.

HybridStack takes its last norm from Transformer Engine whatever the spec says, and GatedDeltaNet
wants fla even in deterministic_mode: `runnable` puts torch's own in their places.
"""

import contextlib
import importlib.util

import torch

from megatron_autorecompute.compat.model_facts import local_spec, torch_norm
from megatron_autorecompute.patched import patched
from tests import mamba_kernels
from tests.support import SEQ_LENGTH, VOCAB, set_weights, tiny_config

HAVE_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
GDN = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "deterministic_mode": True,
    "activation_func": torch.nn.functional.silu,
}


@contextlib.contextmanager
def runnable():
    """In this block HybridModels of `local_spec` are built and run, where Megatron has them."""
    if not HAVE_HYBRID:
        yield
        return
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def l2norm(x, **_):
        return torch.nn.functional.normalize(x, dim=-1)

    MTPLossLoggingHelper.tracker.clear()  # has a place for each depth of the process's first model

    with (
        torch_norm(),
        patched(common, "HAVE_FLA", True),
        patched(common, "l2norm", l2norm),
        mamba_kernels.stand_ins(),
    ):
        yield


def make_runnable():
    """`runnable` to the end of this process."""
    _kept.enter_context(runnable())


_kept = contextlib.ExitStack()


def hybrid_config(pattern, **fields):
    """tiny_config for a pattern, with what Megatron's arguments take from it."""
    from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern

    read = HybridPattern.parse(pattern)
    values = {"num_layers": read.num_layers, "is_hybrid_model": True}
    segments, pp = len(read.segments), fields.get("pipeline_model_parallel_size", 1)
    if segments > pp:
        values["virtual_pipeline_model_parallel_size"] = segments // pp
    if read.mtp_num_layers:
        values["mtp_num_layers"] = read.mtp_num_layers
    if "G" in pattern:
        values |= GDN
    if "M" in pattern:
        values |= mamba_kernels.SIZES
    return tiny_config("moe" if "E" in pattern else "dense", **(values | fields))


def hybrid_chunks(config, pattern, **options):
    """This rank's chunks as HybridModels in training mode, with the same weights in any layout."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for number in range(virtual or 1):
        where = {"ignore_virtual": False, "vp_stage": number} if virtual else {}
        model = HybridModel(
            config,
            local_spec(),
            vocab_size=VOCAB,
            max_sequence_length=SEQ_LENGTH,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=number if virtual else None,
            **{"position_embedding_type": "rope", **options},
        )
        chunks.append(model.to(config.params_dtype).train())
    for model in chunks:
        set_weights(model)
    return chunks


def small_model(pp=1, vpp=None, ep=1, pattern="*-*-*-", **named):
    """The model of the loops' examples: six layers of a HybridModel where Megatron has one, and of
    a GPT before."""
    from examples.loops import small_gpt

    if not HAVE_HYBRID:
        return small_gpt.SmallGPT(pp, vpp, ep, **named)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    class SmallHybrid(small_gpt.SmallGPT):
        def _chunk(self, number):
            spec = local_spec()
            attention = spec.submodules.attention_layer.submodules.self_attention
            attention.submodules.core_attention = self.attention
            # These lengths are few chunks of the usual 128, and a part of one costs as much as all.
            spec.submodules.mamba_layer.submodules.mixer.params["chunk_size"] = 16
            model = HybridModel(
                self.config,
                spec,
                vocab_size=small_gpt.VOCABULARY,
                max_sequence_length=small_gpt.MAX_TOKENS,
                hybrid_layer_pattern=pattern,
                position_embedding_type="learned_absolute",
            )
            ddp = DistributedDataParallelConfig()
            return DistributedDataParallel(self.config, ddp, model).train()

    fields = {"is_hybrid_model": True, **(mamba_kernels.SIZES if "M" in pattern else {})}
    return SmallHybrid(pp, vpp, ep, fields=fields, **named)
