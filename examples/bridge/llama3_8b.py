"""Llama3-8B on one node of eight 80 GB GPUs, with the policy that fits this very node.

    torchrun --nproc-per-node 8 -m megatron_autorecompute.bridge_pretrain \\
        --recipe examples/bridge/llama3_8b.py:llama3_8b_pretrain

NVIDIA's own recipe for these eight H100 in fp8 recomputes the first 5 of 32 layers (full/block/5),
found by hand; as a policy that is "full*5,none*27".
"""

from megatron_autorecompute.integrations import megatron_bridge

megatron_bridge.install()  # above the first import of megatron.bridge

from megatron.bridge.recipes.llama import llama3_8b_pretrain_config  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402


def llama3_8b_pretrain() -> ConfigContainer:
    """Bridge's recipe without context parallelism, which it uses to save memory."""
    cfg = llama3_8b_pretrain_config()
    cfg.model.context_parallel_size = 1
    cfg.train.global_batch_size = 128
    megatron_bridge.set_policy(cfg.model, "auto")
    return cfg
