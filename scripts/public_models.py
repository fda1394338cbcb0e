"""Published dimensions of models, as transformers has them: what Bridge's recipes read of a hub."""

from __future__ import annotations

from typing import Any

LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0}
# transformers' defaults are DeepSeek-V3's, Qwen3-Next-80B's and gpt-oss-120b's.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-8B": (
        "Llama",
        {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, **LLAMA},
    ),
    "meta-llama/Meta-Llama-3-70B": (
        "Llama",
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            **LLAMA,
        },
    ),
    "meta-llama/Meta-Llama-3.1-405B": (
        "Llama",
        {
            "num_hidden_layers": 126,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            **LLAMA,
        },
    ),
    "Qwen/Qwen3-8B": (
        "Qwen3",
        {
            "num_hidden_layers": 36,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "Qwen/Qwen3-30B-A3B": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "head_dim": 128,
        },
    ),
    "Qwen/Qwen3-235B-A22B": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("Qwen3Next", {}),
    "deepseek-ai/DeepSeek-V3": ("DeepseekV3", {"num_nextn_predict_layers": 1}),
    "moonshotai/Kimi-K2-Instruct": (
        "DeepseekV3",
        {
            "vocab_size": 163840,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "openai/gpt-oss-120b": ("GptOss", {}),
    "openai/gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
}

VOCABULARIES = {"nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 131072}
"""Of tokenizers that recipes leave the vocabulary to, as the models' public configs have it."""


def hub_config(name: str) -> Any:
    """The configuration of transformers. Raises ValueError for a model that is not in MODELS."""
    import transformers

    if name not in MODELS:
        raise ValueError(f"the public config of {name} is not in scripts/public_models.py")
    family, fields = MODELS[name]
    kind = getattr(transformers, f"{family}Config")
    return kind(**fields, architectures=[f"{family}ForCausalLM"], torch_dtype="bfloat16")
