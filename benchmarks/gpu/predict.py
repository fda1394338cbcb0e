"""Predict part 8's jobs from their flags, without a device, into the results that measured them;
say how far part 3's peaks are from those that today's planner has for the profiles measured there.

    python -m benchmarks.gpu.predict benchmarks/results/gpu/1/results.json

Needs no GPU, and megatron-core 0.17 or newer, which reads the flags. Writes the pages anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from benchmarks.gpu import page
from benchmarks.gpu.cases import OFFLOADING, Case
from benchmarks.gpu.results import Results
from benchmarks.measured import prediction
from megatron_autorecompute.cli import main as main_command
from megatron_autorecompute.errors import AutorecomputeError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost, evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile

GPUS = {"NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA H200": "h200"}
"""Torch's name of a device, and ours."""
WITHOUT_MASKS = ("--no-create-attention-mask-in-dataloader",)
"""What part 8's script does: its batches have no masks, which Megatron's own loader makes."""


def main() -> None:
    """Predict every measured job of every file named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predict")
    parser.add_argument("results", nargs="+", type=Path, help="results.json of benchmarks.gpu.run")
    for path in parser.parse_args().results:
        results = Results.load(path)
        _predict(results)
        _predict_offload(results)
        _evaluate_again(results)
        results.save()
        page.write(results, path.parent)


def _predict(results: Results) -> None:
    for section in results.sections.values():
        for name, job in list(section.items.items()):
            if section.part != 8 or not name.startswith("job/"):
                continue
            gpu = GPUS.get(results.machine["device"], results.machine["device"])
            flags = (*job["flags"].split(), *WITHOUT_MASKS)
            found = prediction.predicted(prediction.Case(flags, (1,), gpu))
            [*stages] = found.stages
            item = {"uncovered": found.uncovered}
            if stages:
                parts = stages[0].parts
                item = {"peak_bytes": stages[0].peak_bytes, "static_bytes": parts["static"]}
            section.items[name.replace("job/", "predicted/")] = item
            print(name, item)


def _predict_offload(results: Results) -> None:
    for section in results.sections.values():
        if section.part != 9:
            continue
        case, modules, _ = OFFLOADING[section.model]
        gpu = GPUS.get(results.machine["device"], results.machine["device"])
        profile = _estimated(case, modules, gpu)
        layers, microbatches = case.shape.num_layers, case.shape.num_microbatches
        layout, schedule = Layout.from_flags(layers, 1), Schedule(1, 1, microbatches)
        costs: dict[str, PolicyCost] = {}
        for name, found in list(section.items.items()):
            if not name.startswith("policy/") or found["out_of_memory"]:
                continue
            text = found["policy"]
            policy = RecomputePolicy.parse(text, num_layers=layers)
            costs[text] = cost = evaluate(profile, layout, schedule, policy)
            [stage] = profile.stages
            taken = cost.stages[0].peak.bytes - stage.static.total_bytes
            section.items[name.replace("policy/", "predicted/")] = {
                "taken_bytes": taken,
                "times_none": cost.step_ms / costs["none"].step_ms,
            }
            print(name, text, taken, found["peak_bytes"] - found["at_rest_bytes"])


def _estimated(case: Case, modules: Sequence[str], gpu: str) -> Profile:
    """What `estimate --offload` says of the case's job."""
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.yaml"), Path(folder, "profile.json")
        job.write_text(yaml.safe_dump(case.job()), encoding="utf-8")
        words = [str(job), "--gpu", gpu, "-o", str(output)]
        main_command(["estimate", *words, *(w for m in modules for w in ("--offload", m))])
        return Profile.load(output)


def _evaluate_again(results: Results) -> None:
    for name, section in results.sections.items():
        if section.part != 3:
            continue
        profile = Profile.from_json(section.items["profile"])
        [stage] = profile.stages
        # All of the benchmark's residual is what libraries hold; older results do not say so.
        known = replace(stage, others_bytes=stage.residual_bytes)
        profile = replace(profile, stages=(known,))
        layers = profile.model.num_layers
        layout, schedule = Layout.from_flags(layers, 1), Schedule(1, 1, 2)
        errors = []
        for item, found in section.items.items():
            if item.startswith("policy/") and not found["out_of_memory"]:
                policy = RecomputePolicy.parse(found["policy"], num_layers=layers)
                peak = evaluate(profile, layout, schedule, policy).stages[0].peak.bytes
                errors.append(abs(peak / found["allocated_bytes"] - 1))
        print(f"{name}: median {statistics.median(errors):.3%}, worst {max(errors):.3%}")


if __name__ == "__main__":
    try:
        main()
    except AutorecomputeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
