"""DeepSeek-V3 (MLA, 3 dense and 58 expert layers, one prediction depth) on 1,024 GPUs.

    torchrun --nnodes 128 --nproc-per-node 8 -m megatron_autorecompute.bridge_pretrain \\
        --recipe examples/bridge/deepseek_v3.py:deepseek_v3_pretrain

NVIDIA's recipe for these 1,024 H100 recomputes mla_up_proj and mlp in every layer, though only
three layers have a dense MLP: "selective[mla_up_proj+mlp]". The policy has 62 entries, the last
one for the prediction depth.
"""

from megatron_autorecompute.integrations import megatron_bridge

megatron_bridge.install()  # above the first import of megatron.bridge

from megatron.bridge.recipes.deepseek import deepseek_v3_pretrain_config  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402


def deepseek_v3_pretrain() -> ConfigContainer:
    """Bridge's recipe in the layout of NVIDIA's 1,024-GPU recipe: PP8 with 4 chunks a stage."""
    cfg = deepseek_v3_pretrain_config()
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_layout = "Et|(tt|)*30mL"
    cfg.train.global_batch_size = 16384
    megatron_bridge.set_policy(cfg.model, "auto")
    return cfg
