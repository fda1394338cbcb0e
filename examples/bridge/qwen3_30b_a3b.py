"""Qwen3-30B-A3B, 128 experts in every layer, on 8 GPUs: TP4, PP2, EP4.

    torchrun --nproc-per-node 8 -m megatron_autorecompute.bridge_pretrain \\
        --recipe examples/bridge/qwen3_30b_a3b.py:qwen3_30b_a3b_pretrain

Bridge's recipe recomputes every layer (full/uniform/1). The bytes of an expert layer depend on the
routing: auto plans for the 99th percentile of what it saw (--recompute-imbalance-percentile).
"""

from megatron_autorecompute.integrations import megatron_bridge

megatron_bridge.install()  # above the first import of megatron.bridge

from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402


def qwen3_30b_a3b_pretrain() -> ConfigContainer:
    """Bridge's recipe; `set_policy` takes its full/uniform/1 away."""
    cfg = qwen3_30b_a3b_pretrain_config()
    megatron_bridge.set_policy(cfg.model, "auto")
    return cfg
