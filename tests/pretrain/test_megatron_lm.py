"""The unmodified pretrain_gpt.py of a Megatron-LM checkout, by launcher and by patch.

`make megatron-lm-checks MEGATRON_LM=PATH`. What runs is a copy: the checkout stays as it is.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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


def _patch() -> Path:
    info = Path(CHECKOUT, "megatron", "core", "package_info.py").read_text()
    minor = int(re.search(r"^MINOR = (\d+)", info, re.M)[1])
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
