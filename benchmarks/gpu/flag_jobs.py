"""Jobs that part 8 runs by their flags alone, as a user would, and that are predicted from the same
flags without a device.

The dense ones are NVIDIA's functional test gpt3_7b_tp1_pp4_memory_speed (Megatron-LM,
tests/functional_tests/test_cases/gpt) on one GPU: its flags with four of its 32 layers, one
pipeline stage, and without --deterministic-mode, which picks other attention kernels.
"""

from __future__ import annotations

_EVERY = (
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1.5e-4 --min-lr 1e-5 "
    "--lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 1e-2 "
    "--clip-grad 1.0 --bf16 --tokenizer-type NullTokenizer --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --transformer-impl transformer_engine "
    "--distributed-backend nccl --dataloader-type external --log-interval 1 --eval-iters 0 "
    "--eval-interval 10000 --timing-log-level 0 --untie-embeddings-and-output-weights"
)
_DENSE = (
    f"{_EVERY} --num-layers 4 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 131073"
)
_UNFUSED_GRADIENTS = "--no-gradient-accumulation-fusion"
_ROTARY = f"{_DENSE} {_UNFUSED_GRADIENTS} --position-embedding-type rope"
_MODERN = "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
_MOE = (
    f"{_EVERY} {_MODERN} --num-layers 3 --hidden-size 2048 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu "
    "--ffn-hidden-size 6144 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 151936 "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-router-force-load-balancing --attention-dropout 0 --hidden-dropout 0"
)
_HYBRID = (
    f"{_EVERY} --disable-bias-linear --normalization RMSNorm --position-embedding-type none "
    "--hybrid-layer-pattern M-M-M*-M-M- --hidden-size 4096 --ffn-hidden-size 12288 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
    "--squared-relu --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128 "
    "--mamba-num-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 131072 "
    "--attention-dropout 0 --hidden-dropout 0 "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
)
_UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_OFFLOAD = "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"
_PACKED = _DENSE.replace("--group-query-attention --num-query-groups 8 ", "")
_SELECTIVE = "--recompute-granularity selective --recompute-modules"

JOBS = {
    "Nemotron-H, 11 layers, full": f"{_HYBRID} {_UNIFORM}",
    # Attention's queries, keys and values are one tensor here: see keep_apart in offload_modules.
    "7B, 4 layers, a key per query": f"{_PACKED} {_UNFUSED_GRADIENTS}",
    "7B, 4 layers, a key per query, offload": f"{_PACKED} {_UNFUSED_GRADIENTS} {_OFFLOAD}",
    "7B, 4 layers, offload": f"{_DENSE} {_UNFUSED_GRADIENTS} {_OFFLOAD}",
    "Qwen3-30B-A3B, 3 layers": _MOE,
    "Qwen3-30B-A3B, 3 layers, moe_act": f"{_MOE} {_SELECTIVE} moe_act",
    "7B, 4 layers, fp8 tensorwise, fp8 weights": (
        f"{_DENSE} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
    ),
    "7B, 4 layers, full": f"{_DENSE} {_UNFUSED_GRADIENTS} {_UNIFORM}",
    "7B, 4 layers, mlp": f"{_DENSE} --disable-bias-linear {_SELECTIVE} mlp",
    "7B, 4 layers, fp8 blockwise": f"{_DENSE} --fp8-format hybrid --fp8-recipe blockwise",
    "7B, 4 layers": f"{_DENSE} {_UNFUSED_GRADIENTS}",
    "7B, 4 layers, gradient accumulation fusion": _DENSE,
    "7B, 4 layers, core_attn": f"{_DENSE} {_UNFUSED_GRADIENTS} {_SELECTIVE} core_attn",
    "7B, 4 layers, rope": _ROTARY,
    "7B, 4 layers, rope, core_attn": f"{_ROTARY} {_SELECTIVE} core_attn",
    "Nemotron-H, 11 layers": _HYBRID,
}
"""Name and flags; Adam, weights and gradients of each take up to 60 GiB of the device."""
TINY = {
    "local": (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
        "--lr 1e-4 --lr-decay-iters 1000 --vocab-size 255 --tokenizer-type NullTokenizer "
        "--position-embedding-type rope --disable-bias-linear --transformer-impl local "
        "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
        "--no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --log-interval 1 "
        "--eval-iters 0 --eval-interval 10000 --dataloader-type external --timing-log-level 0"
    )
}
"""A dry run's, to which the backend is added."""
