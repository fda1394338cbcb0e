"""The models that are measured, and how one is built on this machine.

Dense GPTs with unfused attention need torch alone; Transformer Engine (TE) is needed on CUDA for
fused layers, grouped experts and multi-latent attention. Off CUDA every case is made of local
layers at a size that runs in seconds: a dry run of the benchmarks, no evidence.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from megatron_autorecompute.compare.comparison import Shape

ROOT = Path(__file__).parents[2]
OUR_CODE = ("megatron_autorecompute", "benchmarks/gpu", "testing", "tests/gpu")
TEXT = ROOT / "LICENSE"


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one size, on one GPU."""

    name: str
    shape: Shape
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the TransformerConfig besides those of the shape."""
    tiny_fields: Mapping[str, Any] = field(default_factory=dict)
    """Over `fields` in a dry run."""
    layers: Literal["local", "te", "gated delta net"] = "local"
    """What its layers are made of on CUDA; the last is local ones with linear attention."""

    def needs_te(self) -> bool:
        """Whether it runs on CUDA with Transformer Engine only."""
        return self.layers == "te"

    def sized(self, tiny: bool) -> Case:
        """Itself, or its likeness for a dry run."""
        if not tiny:
            return self
        tiny_shape = replace(
            self.shape,
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=32,
            micro_batch_size=2,
            bf16=False,
        )
        return replace(
            self, shape=tiny_shape, fields={**self.fields, **self.tiny_fields}, layers="local"
        )

    def configuration(self) -> dict[str, Any]:
        """The whole training job, for the page."""
        fields = {name: getattr(value, "__name__", value) for name, value in self.fields.items()}
        return {**asdict(self.shape), **fields, "layers": self.layers, "dropout": 0.1}

    def job(self) -> dict[str, Any]:
        """Itself as a job that `estimate` and `profile --device` read."""
        shape = self.shape
        fields = {name: getattr(value, "__name__", value) for name, value in self.fields.items()}
        return {
            "name": self.name,
            "config": {
                "num_layers": shape.num_layers,
                "hidden_size": shape.hidden_size,
                "num_attention_heads": shape.num_attention_heads,
                "attention_dropout": 0.1,
                "hidden_dropout": 0.1,
                "gradient_accumulation_fusion": False,
                **fields,
            },
            "num_gpus": 1,
            "seq_length": shape.seq_length,
            "micro_batch_size": shape.micro_batch_size,
            "global_batch_size": shape.micro_batch_size * shape.num_microbatches,
            "vocab_size": 256,
            "transformer_impl": "transformer_engine" if self.needs_te() else "local",
            "position_embedding_type": "learned_absolute",
        }


def _shape(num_layers: int, hidden: int, heads: int, seq: int, micro_batch: int) -> Shape:
    return Shape(num_layers, hidden, heads, seq, micro_batch, 2, 1, True)


# Megatron's own recompute of `mlp` with linear biases never ends, and most models have none.
_NO_BIAS = {"add_bias_linear": False}
_MOE = {
    **_NO_BIAS,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 1024,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
_MLA = {
    **_NO_BIAS,
    "multi_latent_attention": True,
    "normalization": "LayerNorm",
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "rope",
}
GPT3_760M = Case("gpt3-760m-48l", _shape(48, 1536, 16, 1024, 8))
"""The Autodist document's model, linear biases and all."""
DENSE = Case("gpt-350m-unfused", _shape(24, 1024, 16, 1024, 8), _NO_BIAS)
DENSE_TE = Case("gpt-600m-te", _shape(12, 2048, 16, 2048, 4), _NO_BIAS, layers="te")
MOE = Case(
    "moe-8-experts",
    _shape(8, 1024, 16, 2048, 4),
    _MOE,
    {
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_grouped_gemm": False,
    },
    "te",
)
MLA = Case(
    "mla-350m",
    _shape(8, 2048, 16, 2048, 4),
    _MLA,
    {
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    },
    "te",
)
DENSE_8K = Case("gpt-600m-8k", _shape(6, 2048, 16, 8192, 1), _NO_BIAS, layers="te")
DENSE_32K = Case("gpt-600m-32k", _shape(3, 2048, 16, 32768, 1), _NO_BIAS, layers="te")
"""Part 10: attention kept where it costs most to run again."""
_GATED = {
    **_NO_BIAS,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
SHARD_70B = Case(
    "llama-70b-shard",
    _shape(12, 8192, 8, 8192, 1),
    {**_GATED, "kv_channels": 128, "num_query_groups": 1, "ffn_hidden_size": 3584},
    {"kv_channels": 16, "num_query_groups": 1, "ffn_hidden_size": 64},
    "te",
)
"""What a GPU has of 12 layers of Llama3-70B under TP8: the device is never idle."""
DENSE_8B = Case(
    "llama-8b-layers",
    _shape(6, 4096, 32, 8192, 1),
    {**_GATED, "num_query_groups": 8, "ffn_hidden_size": 14336},
    {"num_query_groups": 2, "ffn_hidden_size": 128},
    "te",
)
DEVICE_BOUND = (SHARD_70B, DENSE_8B)
"""Part 2, besides CURVES."""
CURVES = (DENSE, DENSE_TE, MOE, MLA)
"""Parts 2 and 3; part 5 takes those that are there too."""


OFFLOADING: Mapping[str, tuple[Case, tuple[str, ...], tuple[str, ...]]] = {
    DENSE_TE.name: (
        replace(DENSE_TE, shape=replace(DENSE_TE.shape, num_microbatches=4)),
        ("core_attn+attn_proj", "qkv_linear", "core_attn+attn_proj+qkv_linear"),
        (
            "none",
            "none+offload[core_attn+attn_proj]",
            "none+offload[core_attn+attn_proj]*6,none*6",
            "none+offload[qkv_linear]",
            "none+offload[core_attn+attn_proj+qkv_linear]",
            "selective[mlp]",
            "selective[mlp]+offload[core_attn+attn_proj]",
            "selective[mlp]+offload[core_attn+attn_proj]*6,full*6",
            "full",
        ),
    ),
    MOE.name: (
        replace(
            MOE,
            shape=replace(MOE.shape, num_microbatches=4),
            fields={**MOE.fields, "moe_router_force_load_balancing": True},
        ),
        ("core_attn+attn_proj", "expert_fc1", "expert_fc1+moe_act"),
        (
            "none",
            "none+offload[expert_fc1]",
            "none+offload[expert_fc1+moe_act]",
            "none+offload[core_attn+attn_proj]",
            "selective[moe_act]",
            "selective[moe_act]+offload[expert_fc1]",
            "none+offload[expert_fc1]*4,full*4",
            "full",
        ),
    ),
}
"""Part 9: by name the job, the sets of modules that `estimate` is told, and policies."""


def has_te() -> bool:
    """Whether Transformer Engine is installed."""
    return util.find_spec("transformer_engine") is not None


@contextmanager
def started() -> Iterator[None]:
    """A world of one rank in this process, Megatron's groups in it, on whatever is there."""
    import torch
    from megatron.core import parallel_state

    from megatron_autorecompute.meta import without_cuda

    on_cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with _names_without_te() if on_cuda else without_cuda.activate():
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextmanager
def _names_without_te() -> Iterator[None]:
    """What recompute of layernorm needs on CUDA where TE is missing.

    Symptom: NameError: FP8GlobalStateManager in the first backward. Reference:
    `CheckpointWithoutOutput` in megatron-core's tensor_parallel/random.py sets
    `self.fp8 = fp8 is not None`, true for the default False. Remove when it reads `bool(fp8)`.
    """
    from megatron.core.tensor_parallel import random

    names: dict[str, Any] = {
        "activation_recompute_forward": lambda **_: nullcontext(),
        "fp8_autocast": lambda **_: nullcontext(),
        "FP8GlobalStateManager": SimpleNamespace(
            is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
        ),
    }
    missing = {} if random.HAVE_TE else {n: v for n, v in names.items() if not hasattr(random, n)}
    for name, value in missing.items():
        setattr(random, name, value)
    try:
        yield
    finally:
        for name in missing:
            delattr(random, name)


def built(case: Case) -> Any:
    """The case's `TrainingJob`, on the device that is there."""
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_autorecompute.compare.workload import TrainingJob, Variant

    make = {
        "local": gpt_layer_specs.get_gpt_layer_local_spec,
        "te": gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
        "gated delta net": _gated_delta_net_layer,
    }[case.layers]
    variant = Variant(
        case.fields,
        lambda config: make(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            multi_latent_attention=config.multi_latent_attention,
        ),
    )
    # A text may be shorter than one microbatch: it is read again and again.
    text = TEXT.read_bytes()
    least = (case.shape.seq_length + 1) * case.shape.micro_batch_size * 4
    return TrainingJob(case.shape, text * (1 + least // len(text)), variant)


def _gated_delta_net_layer(**options: Any) -> Any:
    """Megatron's own spec of it is made of Transformer Engine only."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_layer_local_spec(**options)
    spec.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    return spec


def machine() -> dict[str, str]:
    """Device, driver, versions and code: everything a figure depends on."""
    import torch

    on_cuda = torch.cuda.is_available()
    packages = ("megatron-core", "transformer-engine", "flash-attn", "fla-core", "triton", "scipy")
    said = {
        "device": torch.cuda.get_device_name() if on_cuda else "CPU",
        "memory_bytes": str(_memory_bytes()) if on_cuda else "0",
        "driver": _driver() if on_cuda else "none",
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(ROOT, *OUR_CODE),
        "sources sha256": _digest(),
    }
    return {**said, **{name: _version(name) for name in packages}}


def commit(checkout: Path, *paths: str) -> str:
    """The last commit of a checkout that touched the paths, and whether they differ from it."""

    def git(*asked: str) -> str:
        command = ["git", "-C", str(checkout), *asked, "--", *paths]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        last = git("log", "-1", "--format=%H")
        return f"{last} and changes" if git("status", "--porcelain") else last
    except (OSError, subprocess.CalledProcessError):
        return "not known: no git checkout"


def _digest() -> str:
    """Of all code that makes a figure: a machine to measure on may have no git."""
    digest = hashlib.sha256()
    for path in sorted(path for name in OUR_CODE for path in (ROOT / name).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _memory_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def _version(package: str) -> str:
    if package == "megatron-core":
        import megatron.core

        return str(megatron.core.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
