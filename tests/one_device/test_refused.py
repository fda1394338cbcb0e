"""What `profile --device` refuses, and with which exit code."""

import pytest
import torch

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.one_device import build, profiling
from tests.one_device.test_profiling import COMMAND, EXPERT, TENSOR, job_file

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="cpu is refused beside CUDA")
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
TE = {"transformer_impl": "transformer_engine"}
HYBRID = {"config": {**SIZES, "is_hybrid_model": True, "hybrid_layer_pattern": "*-"}}


def answer(words, capsys):
    code = main(words)
    return code, " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        (TE, 7, "or change the job to transformer_impl local."),
        ({**TE, **HYBRID}, 7, "measure on a GPU, or take estimate."),
        ({**TE, "lora_rank": 4}, 9, "adapters are Megatron Bridge's"),
        ({"precision": "fp8"}, 9, "transformer_impl local beside"),
    ],
)
def test_a_job_that_the_device_cannot_run_is_no_other_job(changed, code, said, tmp_path, capsys):
    path = job_file(tmp_path / "job.yaml", TENSOR, **changed)
    found, error = answer([*COMMAND, path, "-o", "-"], capsys)
    assert found == code
    assert said in error


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--device", "cuda"], 7, "torch finds no CUDA device"),
        (["--device", "cpu"], 9, "Add --gpu NAME"),
        (["--device", "cpu", "--gpu", "h100", "--offload", "mlp"], 2, "arguments: --offload"),
        ([], 2, "the following arguments are required: --device"),
    ],
)
def test_what_is_missing_is_named(words, code, said, tmp_path, capsys):
    path = job_file(tmp_path / "job.yaml", TENSOR)
    try:
        found, error = answer(["profile", *words, path, "-o", "-"], capsys)
    except SystemExit as left:
        found, error = left.code, " ".join(capsys.readouterr().err.split())
    assert found == code
    assert said in error


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 7, "at selective[core_attn]*1, with one"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_step_that_is_broken_off_says_which(raised, code, said, tmp_path, capsys, monkeypatch):
    steps = iter(range(5))
    original = profiling.JobStep.__call__

    def short(*args):
        if next(steps) == 4:
            raise raised
        return original(*args)

    monkeypatch.setattr(profiling.JobStep, "__call__", short)
    monkeypatch.setattr(profiling, "modelled", lambda *_: (None, None))
    path = job_file(tmp_path / "job.yaml", TENSOR)
    found, error = answer([*COMMAND, path, "-o", str(tmp_path / "p.json")], capsys)
    assert found == code
    assert said in error
    assert not torch.distributed.is_initialized()
    assert not (tmp_path / "p.json").exists()


def test_kernels_of_hybrid_layers_that_are_missing_are_named(monkeypatch):
    def job(pattern):
        config = {**SIZES, "hybrid_layer_pattern": pattern}
        sizes = {"num_gpus": 1, "seq_length": 1, "global_batch_size": 1, "vocab_size": 1}
        return Job(name="hybrid", config=config, **sizes)

    found = {"transformer_engine", "einops"}
    monkeypatch.setattr(build.util, "find_spec", lambda name: name if name in found else None)
    for pattern, lacks in (("*M", "mamba-ssm, causal-conv1d"), ("*G", "flash-linear-attention")):
        with pytest.raises(MachineError, match=f"'{pattern[1]}' in .* Install {lacks};"):
            build.refuse(job(pattern), torch.device("cuda"))
    build.refuse(job("*-E"), torch.device("cuda"))


def test_a_router_that_cannot_be_even_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiling, "modelled", lambda *_: (None, None))
    sinkhorn = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
    path = job_file(tmp_path / "job.yaml", {**EXPERT, **sinkhorn})
    found, error = answer([*COMMAND, path, "-o", "-"], capsys)
    assert found == 4, error
    assert "do not let every expert have equally many tokens" in error
