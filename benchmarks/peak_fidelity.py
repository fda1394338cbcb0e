"""Predicted against real peaks: the cost model against Megatron's own schedule at real sizes.

    python benchmarks/peak_fidelity.py [--policies N] [--only NAME]

A profile is measured on a shard of a few layers in one pipeline stage, by the code that measures
in a job, on meta tensors. From it the peaks of random mixed policies are predicted, and compared
with the bytes that are alive in Megatron's own schedule of the whole pipeline, stage by stage, for
policies that the profile never saw. Results are written as they come, those of the installed
megatron-core beside those of others, and the table of peak_fidelity.md beside it is made of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from rich.progress import track

from megatron_autorecompute.compat import versions
from megatron_autorecompute.meta import without_cuda
from megatron_autorecompute.meta.fake_ranks import StepShape, fake_ranks
from megatron_autorecompute.meta.meta_step import (
    build_chunks,
    build_gpt,
    kept_between_steps,
    meta_config,
)
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import FULL, RecomputePolicy
from megatron_autorecompute.profile import Model, Parallelism, Profile, StaticBytes
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.measurement import Measurement
from megatron_autorecompute.runtime.model_shard import MAX_CHOICES, ModelShard, alone
from testing.meta_stages import TokenStep, stage_step

RESULTS = Path(__file__).parent / "results" / "peak_fidelity.json"
PAGE = RESULTS.with_suffix(".md")
BEGIN, END = "<!-- table: benchmarks/results/peak_fidelity.json -->", "<!-- end of table -->"
LOWEST, HIGHEST = -0.002, 0.005
"""How far a prediction may lie from the real activation peak, as a share of it."""


@dataclass(frozen=True)
class Case:
    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    tp: int
    pp: int
    num_microbatches: int
    vp: int | None = None
    query_groups: int | None = None
    seq_length: int = 4096
    gated: bool = True
    dropout: float = 0.0
    experts: int | None = None
    topk: int = 2
    ep: int = 1
    fields: dict[str, Any] = field(default_factory=dict)


LLAMA_7B = Case("llama 7b", 32, 4096, 11008, 32, tp=2, pp=4, num_microbatches=8)
LLAMA_70B = Case("llama 70b", 80, 8192, 28672, 64, tp=8, pp=8, num_microbatches=16, query_groups=8)
GPT_22B = Case("gpt 22b", 48, 6144, 24576, 64, 8, 4, 8, seq_length=2048, gated=False, dropout=0.1)
MIXTRAL = Case("mixtral", 32, 4096, 14336, 32, 2, 4, 8, query_groups=8, experts=8, ep=4)
# Many small experts: what is kept of the routing is a tenth of a boundary tensor.
QWEN3_30B = Case(
    "qwen3 30b-a3b",
    *(48, 2048, 768, 32, 2, 4, 8),
    query_groups=4,
    experts=128,
    topk=8,
    ep=32,
    fields={"kv_channels": 128, "qk_layernorm": True},
)
OVERLAPPED = {"overlap_p2p_comm": True}
PLAIN_P2P = {"overlap_p2p_comm": False}
CASES = (
    LLAMA_7B,
    replace(LLAMA_7B, name="llama 7b, v=2", vp=2, fields=OVERLAPPED),
    replace(LLAMA_7B, name="llama 7b, v=2, no overlap", vp=2, fields=PLAIN_P2P),
    LLAMA_70B,
    replace(LLAMA_70B, name="llama 70b, v=5", vp=5, fields=OVERLAPPED),
    replace(LLAMA_70B, name="llama 70b, p=16", pp=16, num_microbatches=24),
    replace(
        LLAMA_70B, name="llama 70b, p=16, v=5", pp=16, vp=5, num_microbatches=32, fields=OVERLAPPED
    ),
    GPT_22B,
    MIXTRAL,
    replace(MIXTRAL, name="mixtral, v=2", vp=2, fields=OVERLAPPED),
    QWEN3_30B,
    replace(QWEN3_30B, name="qwen3 30b-a3b, v=2", vp=2, fields=QWEN3_30B.fields | OVERLAPPED),
)


def config(case: Case, **changed: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": case.num_layers,
        "hidden_size": case.hidden_size,
        "ffn_hidden_size": case.ffn_hidden_size,
        "num_attention_heads": case.heads,
        "num_query_groups": case.query_groups,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vp,
        "sequence_parallel": case.tp > 1,
        "attention_dropout": case.dropout,
        "hidden_dropout": case.dropout,
        "add_bias_linear": False,
        "normalization": "RMSNorm" if case.gated else "LayerNorm",
        "gated_linear_unit": case.gated,
        "activation_func": torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        "attention_softmax_in_fp32": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }
    if case.experts:
        values |= {
            "num_moe_experts": case.experts,
            "moe_router_topk": case.topk,
            "moe_ffn_hidden_size": case.ffn_hidden_size,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(**(values | dict(case.fields) | changed))


def shape(case: Case, num_microbatches: int) -> StepShape:
    ranks = case.ep if case.experts else 1
    return StepShape(case.seq_length, 1, num_microbatches, 32000 // 128 * 128, ranks)


def builder(case: Case) -> Any:
    kind = "rope" if case.gated else "learned_absolute"
    return functools.partial(build_gpt, position_embedding_type=kind)


def measured_profile(case: Case) -> Profile:
    """Bytes of every choice, measured on a shard of as many layers as there are choices."""
    depth = MAX_CHOICES + 2
    serial = {"overlap_p2p_comm": False}
    small = config(
        case,
        num_layers=depth,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        **serial,
    )
    size = shape(case, 1)
    small = meta_config(small)
    with without_cuda.activate(meta=True), fake_ranks(small, 0, size):
        models = build_chunks(small, size, builder(case), torch.device("meta"))
        found, kept_bytes = _measured(models, size, depth)
    kept = StaticBytes(buffer_bytes=kept_bytes // depth)
    return replace(
        found,
        model=Model(case.name, case.num_layers),
        kinds=(replace(found.kinds[0], layers=tuple(range(case.num_layers)), static=kept),),
        stages=(),
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
        overlap_p2p_comm=bool(config(case).overlap_p2p_comm),
    )


def _measured(models: list[torch.nn.Module], size: StepShape, depth: int) -> tuple[Profile, int]:
    """A profile, and the bytes that all layers together keep from step to step.

    Not of the first step: a MoE layer keeps its last microbatch's routing, once, which the first
    microbatch would seem to hold.
    """
    parameters = [p for model in models for p in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    static = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    step = TokenStep(size, torch.device("meta"))
    static += step.static
    policy = RecomputePolicy((FULL,) * depth)
    with (
        apply(policy, models) as now,
        LiveBytes(static) as live,
        kept_between_steps(models, live),
    ):
        _run(step, models)
        kept_bytes = live.current_bytes
        measurement = Measurement(ModelShard(models, all_gather=alone), now)
        for _ in measurement.policies():
            with measurement.watch(live):
                _run(step, models)
        shard = Model("shard", depth), Parallelism(1, size.seq_length)
        return measurement.profile(*shard, StaticBytes()), kept_bytes


def _run(step: TokenStep, models: list[torch.nn.Module]) -> None:
    output, loss = step(None, models[0])
    loss(output)[0].backward()


def random_policy(rng: random.Random, profile: Profile, layout: Layout) -> RecomputePolicy:
    """Runs of random choices and checkpoints in every chunk; half of the time mostly full."""
    recorded = [record.choice for record in profile.kinds[0].choices]
    share = rng.choice((0.8, 0.3))
    parts: list[str] = []
    for layers in layout.chunk_layers():
        left = len(layers)
        while left:
            size = rng.randint(1, left)
            group = rng.randint(1, min(size, 4))
            if rng.random() < share:
                size -= size % group
                parts.append(f"full/{group}*{size}" if group > 1 else f"full*{size}")
            else:
                parts.append(f"{rng.choice(recorded)}*{size}")
            left -= size
    return RecomputePolicy.parse(",".join(parts), num_layers=layout.num_layers)


@dataclass(frozen=True)
class Point:
    case: str
    stage: int
    policy: str
    predicted_bytes: int
    megatron_bytes: int
    moment: str

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.megatron_bytes - 1


def points(case: Case, stages: Sequence[int], policies: int) -> Iterator[Point]:
    """Compare full, none and random policies, the stages in turn."""
    rng = random.Random(f"{case.name} 0")
    profile = measured_profile(case)
    layout = Layout.from_flags(case.num_layers, case.pp, case.vp)
    schedule = Schedule(case.pp, case.vp or 1, case.num_microbatches)
    chosen = [RecomputePolicy.parse(text, num_layers=case.num_layers) for text in ("full", "none")]
    chosen += [random_policy(rng, profile, layout) for _ in range(policies)]
    for number, policy in enumerate(chosen):
        cost = evaluate(profile, layout, schedule, policy)
        stage = stages[number % len(stages)]
        real = stage_step(
            config(case), stage, shape(case, case.num_microbatches), policy, builder(case)
        )
        peak = cost.stages[stage].peak
        yield Point(case.name, stage, policy.format(), peak.bytes, real.peak_bytes, peak.moment)


def stages_of(case: Case) -> tuple[int, ...]:
    """First, middle, last but one, last."""
    return tuple(dict.fromkeys((0, case.pp // 2, case.pp - 2, case.pp - 1)))


def case_points(case: Case, stages: Sequence[int], policies: int) -> list[Point]:
    """`points` as a list, for a process of its own."""
    torch.set_num_threads(1)
    return list(points(case, stages, policies))


def write(found: Sequence[Point]) -> None:
    """Put the installed megatron-core's points into the file, and the table into the page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ran = {point.case for point in found}
    version = versions.installed().base_version
    before = results.get(version, {"points": []})["points"]
    data = [point for point in before if point["case"] not in ran]
    data += [asdict(point) | {"error": round(point.error, 6)} for point in found]
    results[version] = {"torch": torch.__version__, "points": data}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), results))


def with_table(page: str, results: dict[str, Any]) -> str:
    """The page with the table of these results between its markers."""
    before, _, rest = page.partition(BEGIN)
    rows = "\n".join(table(results))
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"


def table(results: dict[str, Any]) -> Iterator[str]:
    """Markdown: one row per case, one column of errors per megatron-core."""
    versions = sorted(results)
    heads = ["case", "layers, hidden", "tp", "ep", "p", "v", "microbatches", "points", "peaks, GiB"]
    yield _row([*heads, *(f"error, core {version}" for version in versions)])
    yield "|---" * (len(heads) + len(versions)) + "|"
    for case in CASES:
        by_version = [
            [p for p in results[version]["points"] if p["case"] == case.name]
            for version in versions
        ]
        if any(by_version):
            yield _row([*_facts(case, by_version), *map(_errors, by_version)])


def _facts(case: Case, by_version: list[list[dict[str, Any]]]) -> list[str]:
    sizes = [p["megatron_bytes"] / 2**30 for points in by_version for p in points]
    numbers = (case.tp, case.ep, case.pp, case.vp or 1, case.num_microbatches)
    return [
        case.name,
        f"{case.num_layers}, {case.hidden_size}",
        *map(str, numbers),
        str(max(map(len, by_version))),
        f"{min(sizes):.1f} - {max(sizes):.1f}",
    ]


def _errors(points: list[dict[str, Any]]) -> str:
    errors = [point["error"] for point in points]
    if not errors:
        return "not run"
    return f"{min(errors):+.3%} to {max(errors):+.3%}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", type=int, default=8, help="random ones per case, at least")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parsed = parser.parse_args()
    found: list[Point] = []
    cases = [case for case in CASES if parsed.only in case.name]
    spawn = multiprocessing.get_context("spawn")
    for case in track(cases, description="meta steps"):
        policies = max(parsed.policies, case.pp - 2)  # every stage, full and none besides
        with ProcessPoolExecutor(1, spawn) as pool:  # a meta step wants a process without a group
            found += pool.submit(case_points, case, range(case.pp), policies).result()
        write(found)
        errors = [{"error": point.error} for point in found if point.case == case.name]
        print(case.name, _errors(errors), flush=True)


if __name__ == "__main__":
    main()
