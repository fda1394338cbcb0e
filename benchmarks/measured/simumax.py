"""Runs on eight B200 that SimuMax publishes: peaks of every rank, and SimuMax's prediction.

Source: MooreThreads/SimuMax (Apache-2.0) at 4dcaae51: docs/b200/b200_release_v1.2_summary.json, and
for the flags simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh and
run_pretrain_deepseekv2.sh. `_cef` in a name stands for Transformer Engine's cross entropy
(docs/strategy.md). The measured peaks are torch's, from the start of the process to step 2 or 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.measured.flags import FieldError, flags, milliseconds, whole
from benchmarks.measured.runs import Measured, Run
from megatron_autorecompute.units import GIB

COLUMNS = {"case", "model", "gpu", "world", "layers", "tp", "pp", "ep", "cp", "seq", "mbs"} | {
    "microbatches",
    "max_allocated_mib_by_rank",
}
GPUS = {"B200": "b200-180gb"}
COMMON: dict[str, Any] = {
    **dict.fromkeys(("disable-bias-linear", "swiglu", "no-position-embedding"), True),
    **dict.fromkeys(("untie-embeddings-and-output-weights", "no-bias-dropout-fusion"), True),
    **dict.fromkeys(("use-distributed-optimizer", "use-flash-attn", "sequence-parallel"), True),
    **dict.fromkeys(("bf16", "attention-softmax-in-fp32", "no-masked-softmax-fusion"), True),
    "accumulate-allreduce-grads-in-fp32": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "recompute-granularity": "full",
    "recompute-method": "block",
    "recompute-num-layers": 0,
    "transformer-impl": "transformer_engine",
    "tokenizer-type": "NullTokenizer",
}
GROUPED: dict[str, Any] = {**COMMON, "group-query-attention": True}
MLA: dict[str, Any] = {
    **COMMON,
    **dict.fromkeys(("moe-router-pre-softmax", "moe-grouped-gemm", "moe-permute-fusion"), True),
    **dict.fromkeys(("moe-pad-expert-input-to-capacity", "qk-layernorm"), True),
    "multi-latent-attention": True,
    "moe-token-dispatcher-type": "alltoall",
    "moe-router-score-function": "softmax",
    "moe-router-load-balancing-type": "seq_aux_loss",
    "moe-router-topk-scaling-factor": 16,
    "moe-aux-loss-coeff": 3e-3,
    "moe-expert-capacity-factor": 1,
    "q-lora-rank": 1536,
    "kv-lora-rank": 512,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "rotary-scaling-factor": 1,
    "num-attention-heads": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        **GROUPED,
        **{"hidden-size": 4096, "ffn-hidden-size": 14336, "num-attention-heads": 32},
        **{"num-query-groups": 8, "vocab-size": 128257},
    },
    "llama3-70b": {
        **GROUPED,
        **{"hidden-size": 8192, "ffn-hidden-size": 28672, "num-attention-heads": 64},
        **{"num-query-groups": 8, "vocab-size": 128256},
    },
    "llama3-405b": {
        **GROUPED,
        **{"hidden-size": 16384, "ffn-hidden-size": 53248, "num-attention-heads": 128},
        **{"num-query-groups": 16, "vocab-size": 128256},
    },
    "deepseekv2": {
        **MLA,
        **{"hidden-size": 5120, "ffn-hidden-size": 12288, "num-experts": 160},
        **{"moe-ffn-hidden-size": 1536, "moe-shared-expert-intermediate-size": 3072},
        **{"moe-router-topk": 6, "vocab-size": 102400},
    },
    "deepseekv3": {
        **MLA,
        **{"hidden-size": 7168, "ffn-hidden-size": 18432, "num-experts": 256},
        **{"moe-ffn-hidden-size": 2048, "moe-shared-expert-intermediate-size": 2048},
        **{"moe-router-topk": 8, "vocab-size": 129280},
    },
}


def run(row: Mapping[str, str]) -> Run:
    """One row; raises FieldError that names the field."""
    if row["gpu"] not in GPUS:
        raise FieldError(f"gpu: {row['gpu']!r}; known are {', '.join(GPUS)}")
    world = whole(row, "world")
    given = _given(row, world)
    simumax = row.get("simumax_alloc_gib") or ""
    predicted = {"SimuMax": round(float(simumax) * GIB)} if simumax else {}
    their_ms = milliseconds(row, "simumax_ms", 1)
    moe = "num-experts" in given
    family = "MoE" if moe else "context parallel" if row["cp"] not in ("", "1") else "dense"
    return Run(
        name=row["case"],
        source="SimuMax",
        tier="B200",
        gpu=GPUS[row["gpu"]],
        flags=flags(given),
        worlds=(world,),
        measured=_measured(row, world, predicted),
        step_ms=milliseconds(row, "real_step_ms", 1),
        other_step_ms={} if their_ms is None else {"SimuMax": their_ms},
        family=f"{family}, B200",
    )


def _given(row: Mapping[str, str], world: int) -> dict[str, Any]:
    if row["model"] not in MODELS:
        raise FieldError(f"model: {row['model']!r}; known are {', '.join(MODELS)}")
    if row.get("recompute") and not row["recompute"].startswith("none"):
        raise FieldError(f"recompute: {row['recompute']!r}; only none is known")
    tp, pp, cp = (whole(row, name) for name in ("tp", "pp", "cp"))
    data_parallel = world // (tp * pp * cp)
    given = {
        **MODELS[row["model"]],
        "num-layers": whole(row, "layers"),
        "seq-length": whole(row, "seq"),
        "max-position-embeddings": whole(row, "seq"),
        "micro-batch-size": whole(row, "mbs"),
        "global-batch-size": whole(row, "mbs") * whole(row, "microbatches") * data_parallel,
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
    }
    # simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh and run_pretrain_deepseekv2.sh
    given["no-create-attention-mask-in-dataloader"] = True
    if cp > 1:
        given |= {"context-parallel-size": cp, "cp-comm-type": "a2a"}
    if "num-experts" in given:
        ep = whole(row, "ep")
        given |= {"expert-model-parallel-size": ep, "moe-router-num-groups": ep}
        given["moe-router-group-topk"] = 3 if given["moe-router-topk"] % 3 == 0 else min(4, ep)
        given["moe-layer-freq"] = f"([0]*1+[1]*{given['num-layers'] - 1})*1"
    if row["case"].endswith("_cef"):
        given |= {"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te"}
    return given


def _measured(row: Mapping[str, str], world: int, others: dict[str, int]) -> tuple[Measured, ...]:
    column = "max_allocated_mib_by_rank"
    try:
        peaks = [round(float(text) * (1 << 20)) for text in row[column].split()]
    except ValueError as error:
        raise FieldError(f"{column}: {error}") from error
    if len(peaks) != world:
        raise FieldError(f"{column}: {len(peaks)} peaks of {world} ranks")
    stages = whole(row, "pp")
    size = world // stages
    by_stage = [max(peaks[i * size : (i + 1) * size]) for i in range(stages)]
    fullest = by_stage.index(max(by_stage))
    return tuple(
        Measured(stage, peak, others if stage == fullest else {})
        for stage, peak in enumerate(by_stage)
    )
