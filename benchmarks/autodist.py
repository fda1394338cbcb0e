"""The table this project began with, planned without a device: the Autodist document's.

    python -m benchmarks.autodist

GPT-3 760M widened to 48 layers on two GPUs. Predicts bytes and relative times of the published
settings, and plans for the published limit; writes benchmarks/results/autodist.json and
benchmarks/results/autodist.md.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from benchmarks.gpu.published import LIMIT_GB, ROWS, SAVED, Published  # noqa: E402
from megatron_autorecompute.meta.devices import Device, device  # noqa: E402
from megatron_autorecompute.meta.job import Job, job_from  # noqa: E402
from megatron_autorecompute.meta.profiling import profile_job  # noqa: E402
from megatron_autorecompute.planner.search.problem import Problem  # noqa: E402
from megatron_autorecompute.planner.search.solution import nearness  # noqa: E402
from megatron_autorecompute.planner.search.solve import solve  # noqa: E402
from megatron_autorecompute.policy import RecomputePolicy  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "autodist.json"
PAGE = ROOT / "benchmarks" / "results" / "autodist.md"
LAYERS = 48
MANUAL = "Megatron manual: first 31 full"
POLICIES = {
    "Megatron selective": f"selective[core_attn]+all*{LAYERS}",
    "Megatron full": f"full+all*{LAYERS}",
    MANUAL: f"full+all*31,none*{LAYERS - 31}",
    "Autodist continuous": f"full+all*23,selective[core_attn]+all*{LAYERS - 23}",
}
"""Published rows that say which layer has what. `block` leaves the other layers alone."""
BASE, ANCHOR = "Megatron selective", "Megatron full"
UNPUBLISHED = ("Alpa", "Autodist single")
"""Rows whose plans the document does not say: ours gets their bytes."""
SPLITS = {"tensor parallel 2": False, "tensor parallel 2, sequence parallel": True}


DATA_PARALLEL = "data parallel 2"
ON_H100 = "one H100"
GPU_RUN = "benchmarks/results/gpu/3"
"""Our own run of the same model on one GPU, with its own budget."""


def job(sequence_parallel: bool, tensor_parallel: int = 2) -> Job:
    """The document's case: unfused attention, dropout, linear biases, learned positions."""
    config = {
        "num_layers": LAYERS,
        "hidden_size": 1536,
        "num_attention_heads": 16,
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": sequence_parallel,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }
    data = {
        "name": "gpt3-760m-48l",
        "config": config,
        "num_gpus": 2,
        "seq_length": 1024,
        "micro_batch_size": 8,
        "global_batch_size": 1024,
        "vocab_size": 50257,
        "transformer_impl": "local",
        "te_version": "",
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
        "use_distributed_optimizer": False,
    }
    return job_from(data, "the Autodist document's case")


def gpu() -> Device:
    """An A100 whose host keeps ahead. The published steps are 2.7 times as long as its kernels
    would take: 22 ms a layer and microbatch, for which hosts of Megatron's tests would need 8."""
    a100 = device("a100")
    return replace(a100, reaches=replace(a100.reaches, host_us=0.0, module_us=0.0))


def split(sequence_parallel: bool) -> dict[str, Any]:
    """Every published setting as predicted, and ours, in the document's GB and relative times."""
    begun = time.process_time()
    asked = job(sequence_parallel)
    model = Problem(profile_job(asked, gpu()), asked.layout(), asked.schedule())
    profiled_s = time.process_time() - begun
    rows = {row.name: row for row in ROWS}
    costs = {name: cost_of(model, text) for name, text in POLICIES.items()}
    # Of every row the static bytes are those that the published full row leaves.
    static = rows[ANCHOR].peak_gb - costs[ANCHOR][0]
    budget = (LIMIT_GB - static) * GIB + _static_bytes(model)
    begun = time.process_time()
    plan = solve(model.at(int(budget)))
    solved_s = time.process_time() - begun
    base_ms = costs[BASE][1]
    ours = _activations(model, plan.policy)
    static_bytes = _static_bytes(model)
    at_bytes = {
        name: solve(model.at(int((rows[name].peak_gb - static) * GIB + static_bytes))).cost.step_ms
        for name in UNPUBLISHED
    }
    return {
        "static_gb": round(static, 3),
        "static_bytes_per_parameter": round(static * GIB / _parameters(model), 2),
        "rows": {
            name: {"peak_gb": round(static + peak, 2), "relative": round(ms / base_ms, 4)}
            for name, (peak, ms) in costs.items()
        },
        "ours": {
            "policy": plan.policy.format(),
            "peak_gb": round(static + ours, 2),
            "relative": round(plan.cost.step_ms / base_ms, 4),
            "saves_of_manual": round(1 - plan.cost.step_ms / costs[MANUAL][1], 4),
            "gap": plan.step_evidence.gap,
        },
        "ours_at_bytes": {name: round(ms / base_ms, 4) for name, ms in at_bytes.items()},
        "profiled_s": round(profiled_s, 1),
        "solved_s": round(solved_s, 2),
    }


def data_parallel() -> dict[str, float]:
    """What full recompute saves of the selective setting where two ranks split the batch."""
    asked = job(False, tensor_parallel=1)
    profile = profile_job(asked, gpu(), only=("core_attn",))
    model = Problem(profile, asked.layout(), asked.schedule())
    selective, full = (cost_of(model, POLICIES[name])[0] for name in (BASE, ANCHOR))
    return {"selective_above_full_gb": round(selective - full, 1)}


def on_h100() -> dict[str, Any]:
    """Steps that one H100 measured of the same model, and as predicted, relative to full."""
    run = json.loads((ROOT / GPU_RUN / "results.json").read_text(encoding="utf-8"))
    items = run["sections"]["1-gpt3-760m-48l"]["items"]
    rounds = [item for name, item in items.items() if name.startswith("round/")]
    tried = {
        item["policy"]: statistics.median(item["step_ms"])
        for name, item in items.items()
        if name.startswith("manual/megatron:block/") and item["step_ms"]
    }
    block = min(tried, key=lambda text: tried[text])
    settings = {
        "Megatron full": items["rows"]["full"],
        f"Megatron manual, `{block.removeprefix('megatron:')}`": block,
        f"Megatron manual, `{items['rows']['manual'].removeprefix('megatron:')}`": items["rows"][
            "manual"
        ],
        "ours": items["rows"]["ours"],
    }
    measured = [statistics.median(one[name] for one in rounds) for name in items["rows"]]
    measured.insert(1, tried[block])
    asked = job(False, tensor_parallel=1)
    fields = {**asked.config, "masked_softmax_fusion": False}  # its kernels were not installed
    asked = replace(asked, num_gpus=1, global_batch_size=16, config=fields)
    model = Problem(profile_job(asked, device("h100")), asked.layout(), asked.schedule())
    ends = model.profile.step_end_ms
    predicted = [cost_of(model, text)[1] + ends for text in settings.values()]
    return {
        "rows": {
            name: {
                "measured_ms": round(own, 1),
                "measured": round(own / measured[0], 4),
                "predicted": round(ours / predicted[0], 4),
            }
            for name, own, ours in zip(settings, measured, predicted, strict=True)
        },
        "saves_of_manual": round(
            statistics.median(1 - one["ours"] / one["manual"] for one in rounds), 4
        ),
        "saves_of_block": round(1 - measured[3] / measured[1], 4),
    }


def cost_of(model: Problem, text: str) -> tuple[float, float]:
    policy = RecomputePolicy.parse(text, num_layers=LAYERS)
    return _activations(model, policy), model.cost(policy).step_ms


def _activations(model: Problem, policy: RecomputePolicy) -> float:
    """GiB of the peak beside static bytes."""
    stage = model.cost(policy).stages[0]
    return float(stage.peak_high_bytes - _static_bytes(model)) / GIB


def _static_bytes(model: Problem) -> int:
    return int(model.profile.stages[0].static.total_bytes)


def _parameters(model: Problem) -> float:
    return model.profile.stages[0].static.parameter_bytes / 2


def text(found: dict[str, dict[str, Any]]) -> str:
    """The page."""
    more = found[DATA_PARALLEL]["selective_above_full_gb"]
    parts = [INTRODUCTION.format(data_parallel=f"{more:.1f}"), _from_own_rows()]
    for name in SPLITS:
        parts += [f"## {name[0].upper()}{name[1:]}\n", *_section(found[name])]
    parts += _measured(found[ON_H100])
    return "\n".join(parts)


def _section(one: dict[str, Any]) -> Iterator[str]:
    ours = one["ours"]
    base = next(row for row in ROWS if row.name == BASE)
    lines = [HEADER, ["---"] * len(HEADER)]
    lines += [_line(row, base, one["rows"].get(row.name)) for row in ROWS]
    search = f"{one['profiled_s'] + one['solved_s']:.1f}"
    shown = f"{ours['peak_gb']:.2f}", f"{ours['relative']:.3f}"
    lines.append(["ours, at 16 GB", "-", shown[0], "-", "-", shown[1], "-", search])
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    yield (
        f"Static bytes taken from the published full row: {one['static_gb']:.2f} GB, "
        f"{one['static_bytes_per_parameter']:.1f} bytes for each parameter of a GPU.\n"
    )
    yield (
        f"Ours takes {ours['saves_of_manual']:.1%} less time than the document's manual setting "
        f"(both predicted, on A100s; the document's best saves {SAVED:.1%}, measured). "
        f"{_proven(ours['gap'])} "
        f"Search: {one['profiled_s']:.1f} s to profile and {one['solved_s']:.1f} s to solve, of "
        f"one CPU core's time, where published searches took {_searches()}.\n"
    )
    yield f"Our policy: `{ours['policy']}`.\n"
    yield _unpublished(one["ours_at_bytes"], base)


def _searches() -> str:
    """Seconds of the document's own searches."""
    return ", ".join(f"{row.search_s:,.1f} s ({row.name})" for row in ROWS if row.search_s)


def _unpublished(relative: dict[str, float], base: Published) -> str:
    """Plans that the document does not say, beside ours with their bytes."""
    rows = {row.name: row for row in ROWS}
    said = [
        f"{relative[name]:.3f} with the {rows[name].peak_gb:.2f} GB of {name}, whose own plan was "
        f"measured as {rows[name].step_s / base.step_s:.3f}"
        for name in UNPUBLISHED
    ]
    return f"Ours is predicted to take {', and '.join(said)}.\n"


def _from_own_rows() -> str:
    """What the document's selective and full rows say of their mixtures."""
    rows = {row.name: row for row in ROWS}
    some, every = rows[BASE], rows[ANCHOR]
    saved_gb = (some.peak_gb - every.peak_gb) / LAYERS
    full = math.ceil((some.peak_gb - LIMIT_GB) / saved_gb)
    step_s = some.step_s + full * (every.step_s - some.step_s) / LAYERS
    others = {name: 1 - step_s / rows[name].step_s for name in (MANUAL, "Autodist continuous")}
    return OWN_ROWS.format(
        full=full,
        rest=LAYERS - full,
        step_s=f"{step_s:.1f}",
        peak_gb=f"{some.peak_gb - full * saved_gb:.2f}",
        manual=f"{others[MANUAL]:.1%}",
        continuous=f"{others['Autodist continuous']:.1%}",
    )


def _measured(one: dict[str, Any]) -> Iterator[str]:
    lines = [MEASURED_HEADER, ["---"] * len(MEASURED_HEADER)]
    for name, row in one["rows"].items():
        off = row["predicted"] / row["measured"] - 1
        cells = f"{row['measured_ms']:,.1f}", f"{row['measured']:.3f}", f"{row['predicted']:.3f}"
        lines.append([name, *cells, f"{off:+.1%}"])
    yield MEASURED.format(
        manual=f"{one['saves_of_manual']:.1%}",
        block=f"{one['saves_of_block']:.1%}",
        best=f"{SAVED:.1%}",
        run=GPU_RUN,
    )
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _proven(gap: float | None) -> str:
    if gap is None:
        return "Nothing is proven of how near it is to the optimum."
    return f"In this model it is proven {nearness(gap)}."


HEADER = (
    *("setting", "published GB", "predicted GB", "off by", "published time", "predicted time"),
    *("off by", "search s"),
)


OWN_ROWS = """**By the document's own rows**, on the line between its first two, {rest} layers
selective and {full} full would take {step_s} s at {peak_gb} GB. That is {manual} less than its
manual setting and {continuous} less than its best, with nothing of ours in it.
"""


MEASURED_HEADER = ("setting", "measured ms", "to full", "predicted", "off by")
MEASURED = """## What a GPU measured

**We measured nothing above.** The same model ran on one H100, which holds it whole. The budget was
0.88 of the way from full to selective, as the document's limit is ([run](../../{run}),
[criterion](../../docs/gpu-evidence.md)). Ours took **{manual}** less time than the best manual
setting there, which is a set of modules that the document did not try. It took {block} less than
the best `block`, the document's own measure, where the document's best saves {best}. The
predictions are for an H100 without the kernels of Megatron's masked softmax, which were not
installed there.
"""


def _line(row: Published, base: Published, predicted: dict[str, float] | None) -> list[str]:
    published = row.step_s / base.step_s
    search = "-" if row.search_s is None else f"{row.search_s:,.1f}"
    cells = [row.name, f"{row.peak_gb:.2f}"]
    if predicted is None:
        return [*cells, "-", "-", f"{published:.3f}", "-", "-", search]
    peak, relative = predicted["peak_gb"], predicted["relative"]
    return [
        *cells,
        f"{peak:.2f}",
        f"{peak / row.peak_gb - 1:+.1%}",
        f"{published:.3f}",
        f"{relative:.3f}",
        f"{relative / published - 1:+.1%}",
        search,
    ]


INTRODUCTION = """# The table this project began with

Written by `python -m benchmarks.autodist`. The Autodist document's case is GPT-3 760M widened to
48 layers: 2 GPUs, global batch 1,024, micro-batch 8, limit 16 GB. The document measured the
published figures. This package predicted the others without a device. Times are relative to
Megatron's selective setting.

**Assumed**, because the document does not say it:

- The model has hidden size 1,536 and 16 heads (GPT-3 760M), sequence 1,024, unfused attention,
  dropout 0.1, linear biases and learned positions.
- Tensor parallel is 2, with and without sequence parallelism. Data parallel 2 would put
  {data_parallel} GB between full and selective (predicted), where 10.1 are published.
- Times are a roofline of an A100 ([how](../../docs/estimate-model.md#times)). The published step
  is 2.7 times as long, so only ratios are compared.
- The published 7.09 GB of full recompute leave no room for Adam's state beside fp32 gradients. So
  static bytes are the published bytes of the full row less its predicted activations, and the
  bytes of that row prove nothing. GB are read as GiB.
- "Manual: first 31 layers full" is Megatron's `block`: the other 17 layers recompute nothing.

**What contradicts itself.** The document's continuous row, 23 layers full and 25 selective, takes
8.6 GB more than full. Its selective row takes 10.1 GB more for 48 layers, so 25 of them could take
5.3. Its "selective" must keep more than Megatron's `core_attn` does. The plans of "single" and of
Alpa are not published, so only their bytes are used.
"""


def main() -> None:
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, Any]] = {name: split(of) for name, of in SPLITS.items()}
    found[DATA_PARALLEL] = data_parallel()
    found[ON_H100] = on_h100()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text(found), encoding="utf-8")
    for name, one in found.items():
        print(name, json.dumps(one, indent=1))
    print(f"Written to {PAGE} and {RESULTS}.")


if __name__ == "__main__":
    main()
