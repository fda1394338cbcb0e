"""Llama3-70B on 64 GPUs: TP4, PP4 with 5 chunks a stage, CP2.

    torchrun --nnodes 8 --nproc-per-node 8 -m megatron_autorecompute.bridge_pretrain \\
        --recipe examples/bridge/llama3_70b.py:llama3_70b_pretrain

The first pipeline stage holds the most microbatches and the last holds the loss: every stage gets
its own policy. Megatron's settings are the same for all stages.
"""

from megatron_autorecompute.integrations import megatron_bridge

megatron_bridge.install()  # above the first import of megatron.bridge

from megatron.bridge.recipes.llama import llama3_70b_pretrain_config  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402


def llama3_70b_pretrain() -> ConfigContainer:
    """Bridge's recipe; 64 GPUs are two replicas of 32."""
    cfg = llama3_70b_pretrain_config()
    cfg.train.global_batch_size = 256
    megatron_bridge.set_policy(cfg.model, "auto")
    return cfg
