"""What choices that Megatron lacks buy: benchmarks/results/frontier.md.

    python -m benchmarks.frontier [JOB ...]

For each job, without a device, at nine budgets between what the leanest policy needs and what no
recompute needs: Megatron's best manual setting, the optimum over Megatron's choices, the optimum
over all choices, and which choices are in it. Writes benchmarks/results/frontier/JOB.json of the
jobs named, by default all, and the page from all files there.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from benchmarks import autodist  # noqa: E402
from megatron_autorecompute.meta.devices import Device, device  # noqa: E402
from megatron_autorecompute.meta.job import Job, load_job  # noqa: E402
from megatron_autorecompute.meta.profiling import profile_job  # noqa: E402
from megatron_autorecompute.planner.search.manual import best_manual  # noqa: E402
from megatron_autorecompute.planner.search.problem import Problem  # noqa: E402
from megatron_autorecompute.planner.search.solution import Solution  # noqa: E402
from megatron_autorecompute.planner.search.solve import try_solve  # noqa: E402
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy  # noqa: E402
from megatron_autorecompute.profile import LayerKind, Profile  # noqa: E402
from megatron_autorecompute.units import GIB  # noqa: E402
from scripts.tables import markdown  # noqa: E402

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "megatron_autorecompute" / "examples"
RESULTS = ROOT / "benchmarks" / "results" / "frontier"
PAGE = RESULTS.with_suffix(".md")
GPU = "h100-80gb"
SHARES = (0.002, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Of the way from what the leanest policy needs to what no recompute needs."""
TRIED = (0.05, 0.2, 0.35, 0.5)
"""Shares at which plans are also made with one sort of choices missing."""
SORTS = ("no dead work", "keep[core_attn]", "keep[dispatch]", "mlp_act", "ln_out", "experts")
LONG = {
    "llama3-70b-32k": {
        "seq_length": 32768,
        "global_batch_size": 128,
        "config": {"tensor_model_parallel_size": 4, "context_parallel_size": 4},
    },
    "llama3-70b-128k": {
        "seq_length": 131072,
        "global_batch_size": 16,
        "config": {"tensor_model_parallel_size": 8, "context_parallel_size": 16},
    },
}
"""The 70B at other lengths: fields that differ from the example's."""
MIXTRAL: dict[str, Any] = {
    "seq_length": 4096,
    "num_gpus": 64,
    "global_batch_size": 256,
    "vocab_size": 32000,
    "config": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "expert_model_parallel_size": 8,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
    },
}
"""Mixtral 8x7B in the form of the 70B's example; its alltoall runs between nodes' GPUs."""


def jobs() -> dict[str, Job]:
    """By name."""
    dense = load_job(EXAMPLES / "llama3-70b.yaml")
    found = {"llama3-70b": dense}
    changed = {**LONG, "mixtral-8x7b": MIXTRAL}
    for name, fields in changed.items():
        config = dense.config | fields["config"]
        found[name] = replace(dense, **{**fields, "name": name, "config": config})
    for name in ("llama31-405b", "deepseek-v3", "nemotron-3-nano"):
        found[name] = load_job(EXAMPLES / f"{name}.yaml")
    alltoall = {"moe_token_dispatcher_type": "alltoall"}
    for name in ("deepseek-v3",):
        found[name] = replace(found[name], config=found[name].config | alltoall)
    found["autodist"] = autodist.job(False)
    return found


def gpu_of(name: str) -> Device:
    """The device of a job."""
    return autodist.gpu() if name == "autodist" else device(GPU)


def rows_of(job: Job, gpu: Device) -> Iterator[dict[str, Any]]:
    """One for each budget."""
    profile = profile_job(job, gpu)
    every = Problem(profile, job.layout(), job.schedule())
    megatrons = Problem(profile.as_megatron(), job.layout(), job.schedule())
    less_one = {
        sort: Problem(without(profile, sort), job.layout(), job.schedule())
        for sort in SORTS
        if without(profile, sort) != profile
    }
    low = max(choice.peak_bytes for choice in megatrons.stages.leanest)
    high = max(choice.peak_bytes for choice in megatrons.stages.fastest)
    for share in SHARES:
        budget = int(low + share * (high - low)) + 1
        manual = best_manual(megatrons.at(budget))
        today = try_solve(megatrons.at(budget))
        ours = _shorter(try_solve(every.at(budget)), today)
        lesser = less_one if share in TRIED else {}
        others = {sort: _shorter(try_solve(one.at(budget)), today) for sort, one in lesser.items()}
        yield {
            "share": share,
            "budget_gib": budget / GIB,
            "manual": manual and manual.name,
            "manual_ms": manual and manual.cost and manual.cost.step_ms,
            "megatrons": today and today.policy.format(),
            "megatrons_ms": today and today.cost.step_ms,
            "all": ours and ours.policy.format(),
            "all_ms": ours and ours.cost.step_ms,
            "choices": ours and counted(ours.policy),
            "without_ms": {sort: one and one.cost.step_ms for sort, one in others.items()},
        }


def _shorter(found: Solution | None, today: Solution | None) -> Solution | None:
    """The shorter of two plans: a longer menu has all that Megatron's own choices make."""
    own = [one for one in (found, today) if one is not None]
    return min(own, key=lambda one: one.cost.step_ms, default=None)


def without(profile: Profile, sort: str) -> Profile:
    """The profile without the choices of one sort."""
    return replace(profile, kinds=tuple(_without(kind, sort) for kind in profile.kinds))


def _without(kind: LayerKind, sort: str) -> LayerKind:
    choices = {LayerPolicy.parse(record.choice): record for record in kind.choices}
    found = [r for choice, r in choices.items() if sort not in _sorts(choice, choices)]
    names = {record.choice for record in found}
    inert = {one: other for one, other in kind.inert.items() if other in names}
    return replace(kind, choices=tuple(found), inert=inert)


def _sorts(choice: LayerPolicy, choices: Container[LayerPolicy]) -> list[str]:
    """Of which sorts a choice is, among all that its layer has."""
    reruns_less = not (choice.own or choice.is_megatrons) and choice.as_megatron in choices
    kept = [f"keep[{part}]" for part in choice.keep]
    return ["no dead work"] * reruns_less + kept + list(choice.modules)


def counted(policy: RecomputePolicy) -> dict[str, int]:
    """How many layers have each choice, the most frequent first."""
    return dict(Counter(map(str, policy.layers)).most_common())


def less(one: float | None, other: float | None) -> str:
    """By how much a step is shorter than another, in percent."""
    return "-" if one is None or other is None else f"{100 * (1 - one / other):.1f}"


def table(found: dict[str, Any]) -> str:
    """Of one job."""
    heads = ["way", "GiB", "manual", "ms", "Megatron's choices", "all choices"]
    heads += ["less than manual %", "less than Megatron's choices %", "layers by choice"]
    rows = []
    for row in found["rows"]:
        choices = ", ".join(f"{n} {name}" for name, n in (row["choices"] or {}).items())
        steps = [row["manual_ms"], row["megatrons_ms"], row["all_ms"]]
        shown = ["-" if ms is None else f"{ms:,.0f}" for ms in steps]
        name = (row["manual"] or "none fits").removeprefix("megatron:")
        gains = [less(row["all_ms"], row["manual_ms"]), less(row["all_ms"], row["megatrons_ms"])]
        rows.append(
            [f"{row['share']:.1%}", f"{row['budget_gib']:.2f}", name, *shown, *gains, choices]
        )
    return markdown(heads, rows)


INTRODUCTION = f"""# What the choices that Megatron lacks buy

Written by `python -m benchmarks.frontier`. Every figure is the model's: bytes of Megatron's own
code on meta tensors, and times of a roofline ({GPU}; the Autodist case on its A100). Nothing here
was measured on a GPU.

Each job has nine budgets. A column is the share of the way from what the leanest of Megatron's
policies needs to what no recompute needs. A cell says by how many percent the plan's step is
shorter than two others: than the fastest of Megatron's settings that fits, and than the optimum
over what Megatron's checkpoints can do layer by layer. The plan has all choices of
[policy.md](../../docs/policy.md): no dead work, kept parts, `mlp_act`, `ln_out`, `experts`.
"""
WORTH = """## What each choice is worth

By how many percent the optimum's step is longer if one sort of choices is missing: the most over
{shares} of the way.
"""
ROWS = """In the tables below, one for each job, *way* is that share of the way, *manual* is the
fastest of Megatron's settings that fits, and steps are in ms.
"""


def page(found: dict[str, Any]) -> str:
    """The page's text: what is gained in every job at every budget, and every plan."""
    shares = [f"{row['share']:.1%}" for row in next(iter(found.values()))["rows"]]
    lines = [[name, *map(gains, one["rows"])] for name, one in found.items()]
    gained = markdown(["job", *shares], lines)
    return f"{INTRODUCTION}\n{gained}\n{worth(found)}\n{plans(found)}"


def worth(found: dict[str, Any]) -> str:
    """How much longer the optimum is without a sort of choices, at worst, in every job."""
    lines = [[name, *(_worth(one["rows"], s) for s in SORTS)] for name, one in found.items()]
    shares = ", ".join(f"{share:.0%}" for share in TRIED)
    table = markdown(["job", *SORTS], lines)
    return f"{WORTH.format(shares=shares)}\n{table}"


def _worth(rows: list[dict[str, Any]], sort: str) -> str:
    tried = [(row["without_ms"][sort], row["all_ms"]) for row in rows if sort in row["without_ms"]]
    found = [100 * (other / best - 1) for other, best in tried if other is not None]
    return f"{max(found):.1f}" + ", or does not fit" * (len(found) < len(tried)) if found else ""


def gains(row: dict[str, Any]) -> str:
    """Percent less than the manual setting, and than Megatron's choices."""
    step_ms = row["all_ms"]
    return f"{less(step_ms, row['manual_ms'])}, {less(step_ms, row['megatrons_ms'])}"


def plans(found: dict[str, Any]) -> str:
    """A table for every job."""
    return "\n".join([ROWS, *(f"## {name}\n\n{table(one)}" for name, one in found.items())])


def main(names: list[str]) -> None:
    """Run the jobs named, or all, and write the page."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    every = jobs()
    for name in names or every:
        rows = list(rows_of(every[name], gpu_of(name)))
        text = json.dumps({"job": name, "gpu": gpu_of(name).name, "rows": rows}, indent=1)
        (RESULTS / f"{name}.json").write_text(text + "\n")
        print(name, "written", flush=True)
    files = [RESULTS / f"{name}.json" for name in every]
    found = {f.stem: json.loads(f.read_text()) for f in files if f.exists()}
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
