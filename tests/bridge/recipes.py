"""Recipes of the kinds Bridge ships, small enough for a CPU; made like Bridge's own."""

import warnings

import torch

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def tiny_llama_pretrain_config():
    """Bridge's Llama recipe with a tiny Llama in it, in fp32 on gloo."""
    from transformers import LlamaConfig

    return _recipe(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]))


def tiny_moe_pretrain_config():
    """The same with a Qwen3-MoE."""
    from transformers import Qwen3MoeConfig

    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return _recipe(Qwen3MoeConfig(**SIZES, **moe, architectures=["Qwen3MoeForCausalLM"]))


def tiny_hybrid_pretrain_config():
    """Bridge's hybrid provider, with every family that a CPU can run; Bridge 0.4 on."""
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
    from megatron.bridge.recipes.common import _pretrain_common

    from tests import mamba_kernels
    from tests.hybrid_models import local_spec, make_runnable

    make_runnable()
    cfg = _pretrain_common()
    cfg.model = HybridModelProvider(
        hybrid_layer_pattern="M*-E",
        hybrid_stack_spec=local_spec,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        **mamba_kernels.SIZES,
    )
    for_cpu(cfg)
    return cfg


def tiny_vision_provider():
    """Qwen2.5-VL, whose tower is of transformers."""
    from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    tower = Qwen2_5_VLVisionConfig(**TOWER, fullatt_block_indexes=[1])
    return _vision_provider(Qwen25VLModelProvider, tower)


def tiny_vision_provider_with_features():
    """Qwen3-VL, whose tower also gives features that the first decoder layers add."""
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from transformers.models.qwen3_vl.configuration_qwen3_vl import (
        Qwen3VLTextConfig,
        Qwen3VLVisionConfig,
    )

    # The provider asks for Transformer Engine's layers by this name.
    qwen3_vl_provider.get_gpt_layer_with_transformer_engine_spec = lambda **_: (
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    )
    tower = Qwen3VLVisionConfig(
        **TOWER, patch_size=14, deepstack_visual_indexes=[0, 1], num_position_embeddings=16
    )
    text = Qwen3VLTextConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]},
    )
    return _vision_provider(
        qwen3_vl_provider.Qwen3VLModelProvider, tower, hf_text_config=text, kv_channels=16
    )


TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}


def _vision_provider(kind, tower, **fields):
    from megatron.bridge.recipes.common import _pretrain_common

    cfg = _pretrain_common()
    cfg.model = kind(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        mrope_section=[2, 3, 3],
        vocab_size=128,
        seq_length=32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        image_token_id=100,
        video_token_id=101,
        vision_start_token_id=102,
        vision_config=tower,
        **fields,
    )
    for_cpu(cfg)
    cfg.model.vocab_size = 128
    return cfg.model


def _recipe(hf_config):
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.common import _pretrain_common

    cfg = _pretrain_common()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = AutoBridge.from_hf_config(hf_config)
    cfg.model = bridge.to_megatron_provider(load_weights=False)
    for_cpu(cfg)
    return cfg


def for_cpu(cfg):
    """What a recipe has to say to run on gloo without TE, fused kernels, bf16 or a data set."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    local = {
        "transformer_impl": "local",
        "attention_backend": None,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "cross_entropy_fusion_impl": "native",
        "persist_layer_norm": False,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "seq_length": 32,
        "bf16": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
        "cuda_graph_impl": "none",
    }
    if hasattr(cfg.model, "transformer_layer_spec"):
        local["transformer_layer_spec"] = local_layer_spec
    for name, value in local.items():
        assert hasattr(cfg.model, name), name
        setattr(cfg.model, name, value)
    cfg.mixed_precision = None
    cfg.comm_overlap = None
    cfg.tokenizer.tokenizer_type = "NullTokenizer"
    cfg.tokenizer.tokenizer_model = None
    cfg.tokenizer.vocab_size = 127
    cfg.model.vocab_size = None
    cfg.dataset.seq_length = 32
    cfg.dataset.num_workers = 0
    cfg.dataset.persistent_workers = False
    cfg.dataset.skip_getting_attention_mask_from_dataset = False
    cfg.train.train_iters = 3
    cfg.train.micro_batch_size = 2
    cfg.train.global_batch_size = 8
    cfg.train.eval_iters = 0
    cfg.train.eval_interval = 1000
    cfg.train.manual_gc = False
    cfg.scheduler.lr_warmup_iters = 0
    cfg.scheduler.lr_decay_iters = 100
    cfg.logger.log_interval = 1
    cfg.logger.tensorboard_dir = None
    cfg.checkpoint.save = None
    cfg.checkpoint.load = None
    cfg.dist.distributed_backend = "gloo"
    cfg.ddp.data_parallel_sharding_strategy = "no_shard"
    cfg.optimizer.bf16 = False
    cfg.optimizer.params_dtype = torch.float32
    cfg.optimizer.use_precision_aware_optimizer = False
