"""Golden values of Megatron-LM's functional tests: flags, and memory of the last rank.

Source: NVIDIA/Megatron-LM tests/functional_tests/test_cases, by file and commit in each row
(`golden_path`, `golden_commit`). The values are torch's peak of allocated bytes since the process
began, as the last rank logs it (world_size - 1, so the last pipeline stage).
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measured.flags import (
    FieldError,
    arguments,
    flags,
    milliseconds,
    number,
    whole,
)
from benchmarks.measured.machines import machines
from benchmarks.measured.runs import Measured, Run

COLUMNS = {"case", "tier", "platform", "world", "mem_max_last", "all_args_json"}
GPUS = {"dgx_h100": "h100-80gb", "dgx_gb200": "gb200-186gb", "dgx_a100": "a100-80gb"}
VOCABULARIES = {
    "bpe/vocab.json": 50257,  # GPT-2's
    "bert-large-cased-vocab.txt": 28996,
    "vocab.txt": 30522,  # bert-large-uncased
    "nemotron_2_256k.model": 256000,
    "multiMixV8.gpt4o_nc_sd.500000.128k.vocab.json": 131072,
    "tokenizer.model": 32000,  # Llama 2's
    "${TOKENIZER_MODEL_PATH}": 131072,  # Nemotron 3's, whose rows do not name it
}
"""Entries by the end of the tokenizer's file. The files are not public; the sizes are those of the
tokenizers that bear these names."""
TEST_CASES = "tests/functional_tests/test_cases/"
DATA = Path(__file__).parents[1] / "data"
CONTAINERS = DATA / "megatron_test_containers.csv"
RECORDINGS = DATA / "megatron_recordings.csv"
MOE_RECORDINGS = DATA / "megatron_moe_recordings.csv"
KEPT_MICROBATCHES = DATA / "megatron_kept_microbatches.csv"
VARIABLES = DATA / "megatron_test_variables.csv"
INDEX_ADD = "2025-10-16"
"""Megatron-LM 56818f9e5, since when deterministic MoE layers add up by `index_add_`, which keeps
experts' outputs."""
LAYER_WISE_LAYOUT = "2026-05-21"
NEW_LTS = "2025-11-05"
NEW_TORCH = "26.04"
"""The first container with cuBLAS workspaces of 32 MiB on Blackwell."""
ONE_NODE = 8
UNSAID_WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Tried where a release test's row does not say how many GPUs it ran on."""


def run(row: Mapping[str, str]) -> Run:
    """One row; raises FieldError that names the field."""
    given = arguments(row["all_args_json"], "all_args_json")
    if row["platform"] not in GPUS:
        raise FieldError(f"platform: {row['platform']!r}; known are {', '.join(GPUS)}")
    peak_bytes = whole(row, "mem_max_last")
    reason = uncovered(given, row["case"])
    found: tuple[str, ...] = ()
    sizes, unsaid = None, False
    if not reason:
        given = {**given, "vocab-size": vocabulary(given)}
        given.pop("vocab-extra-ids", None)
        given |= batch(given)
        given |= first_batch(given, row)
        sizes = encoder_decoder(given)
        unsaid = given.pop(QUANTISED_LAYERS, None) is not None
        found = flags(given if sizes is None else as_decoder_only(given))
    between = row.get("mem_allocated_first") or ""
    recorded_with = recordings().get((_path(row), (row.get("golden_commit") or "")[:9]), "")
    recorded = moe_recordings().get((_path(row), row["mem_max_last"]), {})
    return Run(
        name=f"{row['case'].rpartition('/')[2]} ({GPUS[row['platform']].partition('-')[0]})",
        source="Megatron-LM's tests",
        tier=row["tier"],
        gpu=GPUS[row["platform"]],
        flags=found,
        worlds=worlds(row),
        measured=(Measured(-1, peak_bytes),),
        between_steps_bytes=whole(row, "mem_allocated_first") if between else None,
        first_step_bytes=first_step(row),
        second_step_bytes=whole(recorded, "mem_max_second") if recorded else None,
        reached_at_once=_resumed(row) and row.get("mem_max_first") == row["mem_max_last"],
        step_ms=None if unsaid else milliseconds(row, "iter_s_median_2nd_half", 1e3),
        checks_itself=_checks_itself(given),
        encoder_decoder=sizes,
        environment=environment(row, given),
        evaluates=evaluates(row, given),
        added=bool(row.get("added")),
        date=row.get("golden_date") or "",
        peaks_since=recorded.get("since", ""),
        scatters="" < recorded.get("since", "") < INDEX_ADD,
        recorded_with=recorded_with,
        machine=machines().get(recorded_with, ""),
        old_container=(row.get("variant") or "").startswith("lts"),
        flags_without_quantising=flags(in_bf16(given)) if unsaid else (),
        family=family(given),
        uncovered=reason,
    )


def _checks_itself(given: Mapping[str, Any]) -> bool:
    """Weights hashed on the CPU (megatron-core utils.py `check_param_hashes_across_dp_replicas`),
    or the norms of queries and keys gathered and compared, layer by layer, the host waiting for
    each (transformer/attention.py `run_realtime_tests`)."""
    hashes = str(given.get("check-weight-hash-across-dp-replicas-interval")) == "1"
    return hashes or bool(given.get("test-mode"))


def in_bf16(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags without any that quantise layers, or leave some out of it."""
    kept = {"first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"}
    return {k: v for k, v in given.items() if not k.startswith(("fp4", "fp8")) and k not in kept}


def first_step(row: Mapping[str, str]) -> int | None:
    """The peak of the first step, unless the run goes on from a checkpoint."""
    known = row.get("mem_max_first") and not _resumed(row)
    return whole(row, "mem_max_first") if known else None


def evaluates(row: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """Whether an evaluation precedes the last step of the row."""
    interval, number = int(given.get("eval-interval") or 0), int(given.get("eval-iters", 100))
    return bool(number) and 0 < interval < whole(row, "steps")


def _resumed(row: Mapping[str, str]) -> bool:
    return (row.get("variant") or "").endswith("_2nd")


def environment(row: Mapping[str, str], given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What the test's variables and its container say of the job.

    That of long support was 24.01, with Transformer Engine 1.2, before it became 25.09 (Megatron-LM
    23a1dcaf7). It takes no flash-attn 2 where NVTE_ALLOW_NONDETERMINISTIC_ALGO is 0
    (pytorch/attention.py `self.deterministic`), so deterministic runs on A100 have scores. The
    development container has torch's pull request 175344 since 26.04. Muon's layout is
    Megatron-LM's 0044db1f2. Microbatches are kept on first tensor parallel ranks
    (`kept_microbatches`); the last rank is one only without tensor parallelism.
    """
    found: list[tuple[str, Any]] = []
    own = variables().get(row["case"], {})
    if workspaces := own.get("CUBLAS_WORKSPACE_CONFIG"):
        found.append(("cublas_workspace_config", workspaces))
    if own.get("PYTORCH_CUDA_ALLOC_CONF"):
        found.append(("expandable_segments", True))
    date = row.get("golden_date") or "9"
    if (row.get("variant") or "").startswith("lts") and date < NEW_LTS:
        found += [("flash_attn", "deterministic-mode" not in given), ("te_version", "1.2")]
    if "muon" in str(given.get("optimizer")) and date < LAYER_WISE_LAYOUT:
        found.append(("use_layer_wise_param_layout", False))
    first = int(given.get("tensor-model-parallel-size") or 1) == 1
    if first and kept_microbatches_since().get(_path(row), "9") <= date:
        found.append(("keeps_microbatches", True))
    if row["platform"] == "dgx_gb200" and _container(row, date) >= NEW_TORCH:
        found.append(("torch_version", "2.12"))
    return tuple(found)


def _container(row: Mapping[str, str], date: str) -> str:
    known = [container for since, container in containers().get(_path(row), []) if since <= date]
    return known[-1] if known else NEW_TORCH


def _path(row: Mapping[str, str]) -> str:
    return (row.get("golden_path") or "").removeprefix(TEST_CASES)


@functools.cache
def recordings() -> dict[tuple[str, str], str]:
    """Of tests on H100, by golden file and the commit that last wrote it: the commit whose run its
    steps are of, as the file's history shows (later ones added other values, or rewrote it)."""
    with open(RECORDINGS, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {(row["golden_path"], row["golden_commit"]): row["recorded_with"] for row in rows}


@functools.cache
def kept_microbatches_since() -> dict[str, str]:
    """Golden files whose peaks are those of runs of Megatron-LM from 5e4fc931b to bf32f4415, by the
    file's history, and since when."""
    with open(KEPT_MICROBATCHES, newline="", encoding="utf-8") as file:
        return {row["golden_path"]: row["since"] for row in csv.DictReader(file)}


@functools.cache
def variables() -> dict[str, dict[str, str]]:
    """Of tests whose model_config.yaml sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or
    CUBLAS_WORKSPACE_CONFIG without --deterministic-mode, which asks for it too (Megatron-LM
    cf3b8ee60)."""
    with open(VARIABLES, newline="", encoding="utf-8") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


@functools.cache
def moe_recordings() -> dict[tuple[str, str], dict[str, str]]:
    """Of tests with experts, by golden file and last peak: the commit that first had this peak, its
    date, and the peak at the second step that was logged (by the file's history)."""
    with open(MOE_RECORDINGS, newline="", encoding="utf-8") as file:
        return {(row["golden_path"], row["mem_max_last"]): row for row in csv.DictReader(file)}


@functools.cache
def containers() -> dict[str, list[tuple[str, str]]]:
    """By golden file, oldest first: since when it has other peaks, and in which container of
    NVIDIA's (`docker/.ngc_version.dev` of the commit that wrote them). Of runs on GB200; on other
    GPUs the container changes nothing that is counted."""
    found: dict[str, list[tuple[str, str]]] = {}
    with open(CONTAINERS, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["golden_path"], []).append((row["since"], row["container"]))
    return found


def worlds(row: Mapping[str, str]) -> tuple[int, ...]:
    """The row's own number of GPUs; else one node's, but for release tests, which take more."""
    if row["world"]:
        return (whole(row, "world"),)
    if "1node" in row["case"] and row["platform"] == "dgx_gb200":
        return (4,)
    return UNSAID_WORLDS if "release" in (row.get("test_type") or row["case"]) else (ONE_NODE,)


def vocabulary(given: Mapping[str, Any]) -> int:
    """Entries of the vocabulary, before padding."""
    if given.get("vocab-size"):
        return number(given, "vocab-size")
    files = (str(given.get(name) or "") for name in ("tokenizer-model", "vocab-file"))
    path = next(filter(None, files), "")
    for end, size in VOCABULARIES.items():
        if path.endswith(end):
            return size + (number(given, "vocab-extra-ids") if given.get("vocab-extra-ids") else 0)
    raise FieldError(
        f"tokenizer-model, vocab-file: {path or 'none'} is no tokenizer whose size is known; "
        "give --vocab-size"
    )


MULTIMODAL = "multimodal models are no models of this package"
FSDP = "FSDP shards weights and gradients, which is not modelled"
TEACHER = "distillation: the teacher's weights and activations are not modelled"
BY_FOLDER = {
    "bert": "BERT is no model of this package",
    "gpt-nemo": "a recipe of NeMo, by its name: the model's sizes are not in the row",
    "mimo": MULTIMODAL,
    "multimodal-llava": MULTIMODAL,
}
QUANTISED_LAYERS = "te-precision-config-file"
"""Names a file of NVIDIA's that is not public. Nemotron 3 Super is reported to be trained in NVFP4
but for some layers (arXiv:2604.12374); which, for this run, is in the file."""
BY_FLAG = {
    "model-provider": MULTIMODAL,
    "use-megatron-fsdp": FSDP,
    "use-torch-fsdp2": FSDP,
    "perform-rl-step": "reinforcement learning: inference and training share the GPU",
    "enable-router": "flextron: elastic widths are no model of this package",
    "export-kd-cfg": TEACHER,
    "export-kd-teacher-load": TEACHER,
}
"""Why runs are not predicted."""


def uncovered(given: Mapping[str, Any], case: str) -> str:
    """Why a run is not predicted, by its flags; empty if it is."""
    if "inference" in case:
        return "inference: nothing is trained"
    folder = case.partition("/")[0]
    if folder in BY_FOLDER:
        return BY_FOLDER[folder]
    return next((reason for flag, reason in BY_FLAG.items() if flag in given), "")


def batch(given: Mapping[str, Any]) -> dict[str, Any]:
    """The batch in place of a schedule of batches: its last one."""
    schedule = given.get("step-batch-size-schedule")
    if not schedule:
        return {}
    size = str(schedule).split()[-1].rpartition(":")[2]
    if not size.isdigit():
        raise FieldError(f"--step-batch-size-schedule: {schedule!r:.60} names no batch")
    return {"global-batch-size": int(size), "step-batch-size-schedule": False}


def first_batch(given: Mapping[str, Any], row: Mapping[str, str]) -> dict[str, Any]:
    """The batch in place of one that grows, if it has not grown when the run ends."""
    growth = str(given.get("rampup-batch-size") or "").strip("[]").split()
    if not growth:
        return {}
    if len(growth) != 3 or not all(part.isdigit() and int(part) for part in growth):
        raise FieldError(f"--rampup-batch-size: {growth!r:.60} is no start, growth and samples")
    start, each, samples = map(int, growth)
    grows = max(1, (number(given, "global-batch-size") - start) // each)
    if whole(row, "steps") * start > samples // grows:
        return {}
    return {"global-batch-size": start, "rampup-batch-size": False}


def encoder_decoder(given: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """T5's encoder layers, decoder layers, and decoder sequence length."""
    if "encoder-num-layers" not in given:
        return None
    names = ("encoder-num-layers", "decoder-num-layers", "decoder-seq-length")
    if lacking := [name for name in names if name not in given]:
        raise FieldError(f"all_args_json: a T5 model lacks {', '.join(lacking)}")
    encoder, decoder, length = (number(given, name) for name in names)
    return encoder, decoder, length


def as_decoder_only(given: Mapping[str, Any]) -> dict[str, Any]:
    """T5's flags as pretrain_gpt.py reads them: the encoder's sizes."""
    rest = {k: v for k, v in given.items() if not k.startswith(("encoder-", "decoder-"))}
    sizes = {"num-layers": "encoder-num-layers", "seq-length": "encoder-seq-length"}
    return {**rest, **{name: given[of] for name, of in sizes.items()}}


def balanced(given: Mapping[str, Any]) -> str:
    """What makes a run's routing even, if anything does. Sinkhorn's assignment is nearly even,
    whatever was learned; an auxiliary loss, or an expert's bias, has to be learned first.
    Megatron's default coefficient of the auxiliary loss is 0.
    """
    if given.get("moe-router-force-load-balancing"):
        return "forced to be even"
    if given.get("moe-router-load-balancing-type") == "sinkhorn":
        return "evened by Sinkhorn"
    coefficients = str(given.get("moe-aux-loss-coeff") or "0").strip("[]").split()
    biased = given.get("moe-router-enable-expert-bias")
    loss = given.get("moe-router-load-balancing-type") != "none"
    try:
        learned = biased or (loss and any(float(each) for each in coefficients))
    except ValueError as error:
        raise FieldError(f"--moe-aux-loss-coeff: {error}") from error
    if learned:
        return "evened by training"
    return "not evened"


def family(given: Mapping[str, Any]) -> str:
    """Rows that are reported together."""
    if given.get("hybrid-layer-pattern") or given.get("hybrid-override-pattern"):
        return "hybrid"
    if given.get("encoder-num-layers"):
        return "T5"
    if given.get("num-experts"):
        return f"MoE, {balanced(given)}"
    if given.get("context-parallel-size") and number(given, "context-parallel-size") > 1:
        return "context parallel"
    local = given.get("transformer-impl") == "local"
    return "dense, local layers" if local else "dense"
