"""What the integration tests share: tiny Megatron models, one real step.

    def my_ranks_job(tp, pp):                     # at module level; runs in every rank
        start_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        models = tiny_gpt(tiny_config(tensor_model_parallel_size=tp, ...))
        return one_step(models)

    results = run_ranks(my_ranks_job, 4, 2, 2)    # list by rank

A test that needs one rank only, in its own process, calls `run_ranks(function, 1, ...)[0]`.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[1] / "megatron_autorecompute" / "examples"
EXAMPLE_JOBS = ("llama3-70b", "llama31-405b", "deepseek-v3")
"""Those whose profiles the package carries, in the order in which `make examples` runs them."""
VOCAB = 128
SEQ_LENGTH = 32
MICRO_BATCH_SIZE = 2


# ----------------------------------------------------------------------------------------- models


def start_parallel(seed: int = 123, **sizes: Any) -> None:
    """Megatron's parallel state (`initialize_model_parallel(**sizes)`) and its RNG streams."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def tiny_config(kind: str = "dense", *, dropout: float = 0.1, bf16: bool = False, **fields: Any):
    """A config of 4 layers, h=64, 4 heads; kind is "dense", "moe", "mla" or "heterogeneous".

    fields override anything. The schedule's traps on gloo (without_cuda's docstring) are set right
    for the pipeline sizes given in fields.
    """
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    classes = {"mla": MLATransformerConfig, "heterogeneous": HeterogeneousTransformerConfig}
    dtype = torch.bfloat16 if bf16 else torch.float32
    values: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }
    if fields.get("virtual_pipeline_model_parallel_size"):
        values |= {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": False}
    if kind == "moe":
        values |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 64,
            "moe_token_dispatcher_type": "alltoall",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        }
    if kind == "mla":  # value heads as wide as the hidden state: 4 * 16 = 64
        values |= {
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            "rope_type": "rope",
        }
    if kind == "heterogeneous":
        values["heterogeneous_layers_config_encoded_json"] = json.dumps(FOUR_UNLIKE_LAYERS)
    return classes.get(kind, TransformerConfig)(**(values | fields))


def _unlike_layer(attention: str | None = None, mlp: str | None = None) -> dict[str, Any]:
    parts = (("attention", attention, {"n_heads_in_group": 1}), ("mlp", mlp, {"ffn_mult": 2.0}))
    return {
        part: {"no_op": instead == "no_op", "replace_with_linear": instead == "replace_with_linear"}
        | {name: None if instead else number for name, number in size.items()}
        for part, instead, size in parts
    }


FOUR_UNLIKE_LAYERS = {
    "block_configs": [
        _unlike_layer(),
        _unlike_layer(attention="no_op"),
        _unlike_layer(attention="replace_with_linear"),
        _unlike_layer(mlp="no_op"),
    ]
}
"""For HeterogeneousTransformerConfig (NVIDIA's Nemotron-NAS models)."""


def tiny_gpt(config: Any, *, seq_length: int = SEQ_LENGTH, vocab_size: int = VOCAB) -> list[Any]:
    """This rank's chunks as GPTModels in training mode, local spec, parameters in params_dtype.

    Weights depend on the parameter's name with the global layer number alone, so the same model in
    another TP, PP, VPP or EP layout has the same weights.
    """
    models = [
        build_gpt(config, vp_stage, seq_length=seq_length, vocab_size=vocab_size)
        for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1)
    ]
    for model in models:
        set_weights(model)
    return models


def build_gpt(config: Any, vp_stage: int, *, seq_length: int, vocab_size: int) -> Any:
    """One chunk of this rank, with Megatron's own (random) weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )

    mla = config.multi_latent_attention
    if config.heterogeneous_block_specs:
        spec: Any = get_gpt_heterogeneous_layer_spec(config)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            multi_latent_attention=mla,
            qk_layernorm=mla and config.qk_layernorm,
        )
    vp = {"ignore_virtual": False, "vp_stage": vp_stage}
    virtual = bool(config.virtual_pipeline_model_parallel_size)
    options: dict[str, Any] = {"vp_stage": vp_stage} if virtual else {}
    if config.mtp_num_layers:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=options.get("vp_stage")
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=vocab_size,
        max_sequence_length=seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**(vp if virtual else {})),
        post_process=parallel_state.is_pipeline_last_stage(**(vp if virtual else {})),
        position_embedding_type="rope" if mla else "learned_absolute",
        share_embeddings_and_output_weights=False,
        **options,
    )
    return model.to(config.params_dtype).train()


def set_weights(model: Any) -> None:
    """Weights ~ N(0, 0.02) seeded by global parameter name; norms keep their ones and zeros."""
    with torch.no_grad():
        for name, parameter in global_parameters(model).items():
            if "layernorm" not in name:
                parameter.copy_(_shard(name, parameter, model.config))


def global_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, with 0-based global indices for decoder layers and experts."""
    from megatron.core.utils import unwrap_model

    model = unwrap_model(model)
    return {_global_name(model, name): parameter for name, parameter in model.named_parameters()}


def _global_name(model: Any, name: str) -> str:
    from megatron.core import parallel_state

    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        position = parts.index("local_experts") + 1
        experts = model.config.num_moe_experts
        local = experts // parallel_state.get_expert_model_parallel_world_size()
        first = local * parallel_state.get_expert_model_parallel_rank()
        parts[position] = str(first + int(parts[position]))
    return ".".join(parts)


def _shard(name: str, parameter: torch.Tensor, config: Any) -> torch.Tensor:
    from megatron.core import parallel_state as ps

    expert = "local_experts" in name
    group = ps.get_expert_tensor_parallel_group if expert else ps.get_tensor_model_parallel_group
    size, rank = group().size(), group().rank()
    shape = list(parameter.shape)
    split = getattr(parameter, "tensor_model_parallel", False)
    if split:
        shape[parameter.partition_dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    full = torch.randn(shape, generator=generator) * 0.02
    if not split:
        return full
    if config.gated_linear_unit and "linear_fc1" in name:  # gate and up are split separately
        halves = full.chunk(2, parameter.partition_dim)
        return torch.cat([h.chunk(size, parameter.partition_dim)[rank] for h in halves])
    return full.chunk(size, parameter.partition_dim)[rank]


# ------------------------------------------------------------------------------------------- step


def microbatch(
    seed: int = 0,
    *,
    micro_batch_size: int = MICRO_BATCH_SIZE,
    seq_length: int = SEQ_LENGTH,
    vocab_size: int = VOCAB,
) -> dict[str, torch.Tensor]:
    """GPTModel.forward's arguments: tokens, positions and labels [b, s], mask [1, 1, s, s]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (micro_batch_size, seq_length)
    return {
        "input_ids": torch.randint(0, vocab_size, shape, generator=generator),
        "position_ids": torch.arange(seq_length).expand(shape),
        "attention_mask": torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool).triu(1),
        "labels": torch.randint(0, vocab_size, shape, generator=generator),
    }


def seen_twice(count: Callable[[], Any]) -> Any:
    """The first of its counts to come a second time: about one in eighty has 256 bytes too many,
    with and without a policy."""
    seen: list[Any] = []
    while (found := count()) not in seen:
        assert len(seen) < 9, f"no two counts are equal: {seen}"
        seen.append(found)
    return found


@dataclass(frozen=True, slots=True)
class StepResult:
    """losses: one per microbatch, on the last stage only; gradients by global parameter name."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]

    def same_bits(self, other: "StepResult") -> bool:
        """Whether losses and every gradient are equal to the last bit."""
        return (
            self.losses == other.losses
            and self.gradients.keys() == other.gradients.keys()
            and all(torch.equal(g, other.gradients[n]) for n, g in self.gradients.items())
        )


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's forward_step_func for an iterator of microbatch() dictionaries."""
    output = model(**next(iterator))

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_function


def one_step(
    models: list[Any],
    *,
    num_microbatches: int = 2,
    seed: int = 9,
    clear: bool = True,
    **shape: int,
) -> StepResult:
    """One forward-backward of Megatron's own schedule from a fixed RNG seed.

    clear: set gradients to None first (leave them alone where DDP owns them). shape:
    micro_batch_size, seq_length, vocab_size, as microbatch() takes them.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    for model in models if clear else []:
        model.zero_grad(set_to_none=True)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    batches = [microbatch(index, **shape) for index in range(num_microbatches)]
    several = len(models) > 1
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models] if several else iter(batches),
        model=models if several else models[0],
        num_microbatches=num_microbatches,
        seq_length=shape.get("seq_length", SEQ_LENGTH),
        micro_batch_size=shape.get("micro_batch_size", MICRO_BATCH_SIZE),
        forward_only=False,
    )
    gradients = {
        name: parameter.grad.clone()
        for model in models
        for name, parameter in global_parameters(model).items()
        if parameter.grad is not None
    }
    return StepResult(tuple(entry["loss"].item() for entry in reduced), gradients)
