"""The unmodified pretrain_gpt.py of a Megatron-LM checkout, by launcher and by patch; also
pretrain_hybrid.py (from 0.19) and pretrain_t5.py (to 0.17).

`make megatron-lm-checks MEGATRON_LM=PATH`. What runs is a copy: the checkout stays as it is.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_autorecompute.planner.plan import Plan
from tests.pretrain.jobs import FOUR_RANKS, MODEL, ROOT, WITHOUT_US, run

CHECKOUT = os.environ.get("MEGATRON_LM")
if CHECKOUT is None:
    pytest.skip("MEGATRON_LM names no Megatron-LM checkout", allow_module_level=True)

DATA = "--mock-data --split 100,0,0 --num-workers 0 --no-create-attention-mask-in-dataloader "
FLAGS = MODEL + DATA + FOUR_RANKS
MIXED = "--recompute-policy full*1,selective[core_attn]*1,none*1,selective[core_attn+layernorm]*1 "
AUTO = "--recompute-policy auto --recompute-memory-budget-gib 1 "


def _copy(to: Path) -> Path:
    for path in Path(CHECKOUT).glob("*.py"):
        shutil.copy(path, to)
    shutil.copytree(Path(CHECKOUT, "megatron"), to / "megatron")
    helpers = "megatron.core.datasets.helpers_cpp"  # a wheel has it built
    built = importlib.util.find_spec(helpers)
    datasets = to / "megatron" / "core" / "datasets"
    if built is not None and not list(datasets.glob("helpers_cpp*.so")):
        shutil.copy(built.origin, datasets)
    return to


def _minor() -> int:
    info = Path(CHECKOUT, "megatron", "core", "package_info.py").read_text()
    return int(re.search(r"^MINOR = (\d+)", info, re.M)[1])


def _patch() -> Path:
    minor = _minor()
    folder = "main-2026-08" if minor == 20 else f"core_r0.{minor}.0"
    return ROOT / "patches" / folder / "megatron-autorecompute.patch"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return _copy(tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    tree = _copy(tmp_path_factory.mktemp("patched"))
    subprocess.run(["git", "init", "--quiet", "."], cwd=tree, check=True)
    subprocess.run(["git", "apply", str(_patch())], cwd=tree, check=True)
    return tree


@pytest.fixture(scope="module")
def without_us(untouched):
    job = run(untouched / "pretrain_gpt.py", FLAGS, ranks=4, way_in=WITHOUT_US)
    assert len(job.losses) == 4, job.text
    return job


def test_through_the_launcher_a_policy_changes_no_digit_of_the_loss(untouched, without_us):
    job = run(untouched / "pretrain_gpt.py", FLAGS + MIXED, ranks=4)
    assert job.losses == without_us.losses, job.text
    assert job.returncode == 0


def test_through_the_launcher_auto_changes_no_digit_of_the_loss(untouched, without_us, tmp_path):
    plan = tmp_path / "plan.json"
    flags = FLAGS + AUTO + f"--recompute-plan-path {plan} --train-iters 20"
    job = run(untouched / "pretrain_gpt.py", flags, ranks=4)
    assert job.losses[:4] == without_us.losses, job.text
    assert plan.exists()


def test_the_patched_sources_without_a_policy_train_as_before(patched, without_us):
    job = run(patched / "pretrain_gpt.py", FLAGS, ranks=4, way_in=WITHOUT_US)
    assert job.losses == without_us.losses, job.text


def test_the_patched_sources_need_no_launcher(patched, without_us):
    job = run(patched / "pretrain_gpt.py", FLAGS + MIXED, ranks=4, way_in=WITHOUT_US)
    assert job.losses == without_us.losses, job.text


def test_the_patched_sources_do_auto_themselves(patched, without_us, tmp_path):
    plan = tmp_path / "plan.json"
    flags = FLAGS + AUTO + f"--recompute-plan-path {plan} --train-iters 20"
    job = run(patched / "pretrain_gpt.py", flags, ranks=4, way_in=WITHOUT_US)
    assert job.losses[:4] == without_us.losses, job.text
    assert plan.exists()


def test_the_patched_sources_take_the_launcher_as_well(patched, without_us):
    job = run(patched / "pretrain_gpt.py", FLAGS + MIXED, ranks=4)
    assert job.losses == without_us.losses, job.text


def test_the_patched_sources_refuse_as_the_launcher_does(patched, untouched):
    flags = MODEL + DATA + "--recompute-policy full --recompute-granularity selective "
    by_patch = run(patched / "pretrain_gpt.py", flags, way_in=WITHOUT_US)
    by_launcher = run(untouched / "pretrain_gpt.py", flags)
    assert by_patch.said == by_launcher.said
    assert len(by_patch.said) == 1, by_patch.text


HYBRID = (
    "--spec tests.pretrain.hybrid_spec SPEC --hybrid-layer-pattern M*-|E "
    "--pipeline-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --mamba-state-dim 16 --mamba-head-dim 16 "
    "--mamba-num-groups 2 --mamba-num-heads 8 --train-iters 20 "
)
HYBRID_FLAGS = MODEL.replace("--num-layers 4 ", "") + DATA + HYBRID
HYBRID_MIXED = "--recompute-policy full/2*2,selective[mlp]*1,selective[moe]*1 "


@pytest.fixture(scope="module")
def plain_hybrid(untouched):
    if _minor() < 19:
        pytest.skip("the local layers of these tests are those of 0.19")
    job = run(untouched / "pretrain_hybrid.py", HYBRID_FLAGS, ranks=2, way_in=WITHOUT_US)
    assert len(job.losses) == 20, job.text
    return job


@pytest.mark.parametrize("way_in", ["launcher", "patch"])
def test_the_real_hybrid_takes_a_text_auto_and_the_plan_that_auto_leaves(
    untouched, plain_hybrid, request, tmp_path, way_in
):
    plan = tmp_path / "plan.json"
    auto = (
        f"--recompute-policy auto --recompute-memory-budget-gib 0.01 --recompute-plan-path {plan} "
    )
    for policy in (HYBRID_MIXED, auto, f"--recompute-policy @{plan} "):
        if way_in == "launcher":
            job = run(untouched / "pretrain_hybrid.py", HYBRID_FLAGS + policy, ranks=2)
        else:
            script = request.getfixturevalue("patched") / "pretrain_hybrid.py"
            job = run(script, HYBRID_FLAGS + policy, ranks=2, way_in=WITHOUT_US)
        assert job.losses == plain_hybrid.losses, job.text
    kinds = {kind.name: kind.layers for kind in Plan.load(plan).profile.kinds}
    assert kinds == {"mamba": (0,), "attention": (1,), "mlp": (2,), "moe": (3,)}


T5_FLAGS = (
    "--encoder-num-layers 4 --decoder-num-layers 4 --encoder-seq-length 32 --decoder-seq-length 16 "
    "--tokenizer-type BertWordPieceLowerCase --legacy-tokenizer --vocab-extra-ids 100 "
    "--position-embedding-type learned_absolute --split 100,0,0 --num-workers 0 --train-iters 18 "
)
T5_MIXED = "--recompute-policy full*2,none*1,selective[core_attn]*2,full*2,selective[mlp]*1 "
T5_AUTO = "--recompute-policy auto --recompute-memory-budget-gib 0.0095 --recompute-plan-path "


@pytest.fixture(scope="module")
def t5_flags(untouched, tmp_path_factory):
    if not (untouched / "pretrain_t5.py").exists():
        pytest.skip("pretrain_t5.py left Megatron-LM after 0.17")
    folder = tmp_path_factory.mktemp("t5")
    python_path = os.pathsep.join([str(untouched), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("t5_data.py")), str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    # GPT's flags for the same things, which T5 has two of, or takes from its vocabulary.
    model = re.sub(r"--(num-layers|seq-length|vocab-size|tokenizer-type) \S+ ", "", MODEL)
    return f"{model}{T5_FLAGS}--data-path {folder}/data --vocab-file {folder}/vocab.txt "


@pytest.mark.parametrize("way_in", ["launcher", "patch"])
def test_the_real_t5_takes_a_text_auto_and_the_plan_that_auto_leaves(
    untouched, patched, t5_flags, tmp_path, way_in
):
    plan = tmp_path / "plan.json"
    without = run(untouched / "pretrain_t5.py", t5_flags, way_in=WITHOUT_US)
    assert len(without.losses) == 18, without.text
    for policy in (T5_MIXED, f"{T5_AUTO}{plan} ", f"--recompute-policy @{plan} "):
        if way_in == "launcher":
            job = run(untouched / "pretrain_t5.py", t5_flags + policy)
        else:
            job = run(patched / "pretrain_t5.py", t5_flags + policy, way_in=WITHOUT_US)
        assert job.losses == without.losses, job.text
    assert plan.exists()
