"""Hold NVIDIA's recipes that move whole layers to host memory against the planner; write a page.

python scripts/offload_recipes.py [--output docs/offload-recipes.md]
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from megatron_autorecompute.meta.devices import device  # noqa: E402
from megatron_autorecompute.meta.job import Job, job_from  # noqa: E402
from megatron_autorecompute.meta.profiling import profile_job  # noqa: E402
from megatron_autorecompute.meta.whole_layer_records import with_whole_layers  # noqa: E402
from megatron_autorecompute.planner.planner import Planner  # noqa: E402
from megatron_autorecompute.policy import RecomputePolicy  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from nvidia_recipes import MODELS, PRECISIONS  # noqa: E402

ALIKE = 1.0005
"""Steps that differ by less are as fast."""
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
"""Megatron has no module to offload inside a dense MLP."""


@dataclass(frozen=True)
class Recipe:
    """One of NVIDIA's, of Megatron Bridge's perf_recipes of August 2026."""

    name: str
    gpu: str
    dtype: str
    layers: int
    """`cpu_offloading_num_layers`."""
    micro_batch_size: int


RECIPES = [
    Recipe("llama3_70b_pretrain_64gpu_b200_fp8cs", "b200-180gb", "fp8_cs", 5, 1),
    Recipe("llama3_70b_pretrain_64gpu_gb200_bf16", "gb200-186gb", "bf16", 20, 1),
    Recipe("llama3_70b_pretrain_64gpu_gb200_fp8cs", "gb200-186gb", "fp8_cs", 40, 2),
    Recipe("llama3_70b_pretrain_64gpu_gb300_bf16", "gb300-279gb", "bf16", 30, 2),
    Recipe("llama3_70b_pretrain_64gpu_gb300_fp8cs", "gb300-279gb", "fp8_cs", 20, 2),
]


def job_of(recipe: Recipe) -> Job:
    """The recipe as a job without Megatron FSDP."""
    data = {
        "name": recipe.name,
        "config": MODELS["llama3_70b"].config,
        "num_gpus": 64,
        "seq_length": 8192,
        "micro_batch_size": recipe.micro_batch_size,
        "global_batch_size": 256,
        "vocab_size": 128256,
        "precision": PRECISIONS[recipe.dtype],
    }
    return job_from(data, recipe.name)


def line(recipe: Recipe) -> list[str]:
    """One line of the table."""
    job, gpu = job_of(recipe), device(recipe.gpu)
    plain = profile_job(job, gpu, only=("mlp",), offload=[ATTENTION])
    planner = Planner(plain, job.layout(), job.schedule())
    whole = planner.replaced(profile=with_whole_layers(job, plain))

    text = f"megatron:cpu_offloading/{recipe.layers}"
    theirs = whole.evaluate(RecomputePolicy.parse(text, num_layers=plain.num_layers))
    nothing = planner.evaluate(RecomputePolicy.parse("none", num_layers=plain.num_layers))
    static = plain.stages[0].static.total_bytes
    ours = planner.try_solve(theirs.peak_high_bytes)
    link = gpu.host.link
    return [
        recipe.name,
        f"{recipe.layers} of {plain.num_layers}",
        f"{link.to_host_gb_per_s:g}",
        f"{(nothing.peak_high_bytes - static) / GIB:.1f}",
        f"{(theirs.peak_high_bytes - static) / GIB:.1f}",
        f"{theirs.stages[0].host_bytes / GIB:.1f}",
        f"{nothing.step_ms / 1e3:.2f}",
        f"{theirs.step_ms / 1e3:.2f}",
        f"{theirs.stall_ms / 1e3:.2f}",
        "-" if ours is None else f"{ours.cost.step_ms / 1e3:.2f}",
        "-" if ours is None else f"{ours.cost.stages[0].host_bytes / GIB:.1f}",
        "theirs" if ours is None or theirs.step_ms * ALIKE < ours.cost.step_ms else "searched",
    ]


PAGE = """# NVIDIA's recipes that move whole layers to host memory

Written by `python scripts/offload_recipes.py`. **Nothing on this page is measured.** Bytes come
from Megatron's code on meta tensors, times from a roofline, copies from a replay of what
Transformer Engine's source does ([offload.md](offload.md)).

These are Megatron Bridge's performance recipes of August 2026 with `cpu_offloading` of Llama 3 70B.
Those of Llama 3.1 405B (40 of 126 layers) are not here yet; those of GPT-OSS 20B set
`cpu_offloading_num_layers=95` without it, so that nothing leaves. All run Megatron FSDP, which is
not modelled: it adds the same bytes and collectives to every column. So a row compares at the peak
that NVIDIA's setting needs: theirs, and what the planner's search finds
(full recompute, recompute of the MLP, and Megatron's fine-grained offload of attention, the only
part of a dense layer that it can move). The faster of both is what to run; Megatron's setting has
a name for that, `megatron:cpu_offloading/N`.

The links are those of `meta/devices.json`, in 10^9 bytes per second of one device while its
neighbours copy, all of them guesses: B200 as H100, GB200 and GB300 half of a Grace's memory
bandwidth. Copies slow no kernel and no collective, also not FSDP's, and both directions share one
stream, as in Transformer Engine. The search may take the host memory that `devices.json` assumes
per device (112 GiB of GB200 and GB300); theirs takes what it takes.

{table}
"""
HEADER = (
    *("recipe", "layers that leave", "GB/s", "GiB without", "GiB with theirs", "their host GiB"),
    *("s without", "s with theirs", "of it waits", "searched s", "its host GiB", "faster"),
)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "offload-recipes.md")
    asked = parser.parse_args()
    rows = []
    for recipe in RECIPES:
        rows.append(line(recipe))
        print(*rows[-1], sep=" | ", flush=True)
    cells = [HEADER, ["---"] * len(HEADER), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    asked.output.write_text(PAGE.format(table=table))


if __name__ == "__main__":
    main()
