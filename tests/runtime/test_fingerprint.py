"""What a plan holds for: every setting that changes bytes or times, and nothing that does not."""

import enum
import functools
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.integrations.megatron_lm import shapes_of
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.runtime.fingerprint import rendered
from testing.ranks import run_ranks
from tests.default_model import tiny_model
from tests.support import start_parallel, tiny_config

ROOT = Path(__file__).parents[2]


class Backend(enum.Enum):
    fused = 1


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Backend.fused, "Backend.fused"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.nn.functional.silu, "<function silu>"),
        (functools.partial(abs), "functools.partial(<built-in function abs>)"),
        ((16, 0), "[16, 0]"),
        ([16, 0], "[16, 0]"),
        ({"b": 1, "a": [None]}, "[a: [None], b: 1]"),
        ({"c", "a", "b"}, "[a, b, c]"),
        (object(), "<object object>"),
    ],
)
def test_a_value_of_any_type_is_text_without_addresses(value, text):
    assert rendered(value) == text


def job(distributed=False, **fields):
    """A small model with an optimizer as Megatron's training job has it, callbacks included."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = tiny_config(**fields)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=True
    )
    chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in tiny_model(config)]
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=distributed)
    optimizer = get_megatron_optimizer(settings, chunks)
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.grad_scale_func = optimizer.scale_loss
    config.timers = lambda: None
    return chunks, optimizer


def described(chunks, optimizer, layout=None):
    from megatron_autorecompute.compat import model_layers, stage_layout
    from megatron_autorecompute.runtime.fingerprint import fingerprint

    layout = layout or stage_layout.pipeline_layout(model_layers.unwrapped(chunks[0]).config)
    return fingerprint(chunks, optimizer, layout, {"device": "CPU"})


def started(distributed=False, **fields):
    stages = fields.get("pipeline_model_parallel_size", 1)
    start_parallel(pipeline_model_parallel_size=stages)
    return described(*job(distributed, **fields))


def on_two_stages():
    return started(kind="moe", pipeline_model_parallel_size=2)


def test_all_ranks_describe_the_job_alike():
    first, second = run_ranks(on_two_stages, 2)
    assert first == second
    assert first["layers"] == "E0-1|2-3L"
    assert first["model.post_process"] == "False / True"


ALONE = """
import json
import torch
from megatron_autorecompute.meta import without_cuda
from tests.runtime.test_fingerprint import started
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
with without_cuda.activate():
    print(json.dumps(started(kind="moe")))
"""


@pytest.mark.any_version
def test_two_starts_describe_the_job_alike():
    start = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},  # the order of sets; and addresses
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
    )
    first = json.loads(start.stdout)
    (second,) = run_ranks(functools.partial(started, kind="moe"), 1)
    assert first == second
    assert "0x" not in str(first)


@pytest.mark.any_version
def test_data_parallel_ranks_and_the_distributed_optimizer_make_another_job():
    alone, pair, sharded = (
        run_ranks(started, ranks, distributed)[0]
        for ranks, distributed in ((1, False), (2, False), (2, True))
    )
    assert differing(alone, pair) == {"world_size"}
    assert differing(pair, sharded) >= {
        "ddp.use_distributed_optimizer",
        "optimizer.use_distributed_optimizer",
        "optimizer",
    }


def differing(one, other):
    return {name for name in one | other if one.get(name) != other.get(name)}


def settings():
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    return {
        "attention_backend": AttnBackend.unfused,
        "activation_func": torch.nn.functional.silu,
        "window_size": (16, 0),
        "moe_layer_freq": [1, 0, 0, 0],
        "pipeline_model_parallel_layout": PipelineParallelLayerLayout("Ett|ttL", 2),
        "attention_dropout": 0.0,
        "fp8": "hybrid",
    }


@pytest.fixture(scope="module")
def here(one_rank):
    return job()


def test_a_setting_of_any_type_makes_another_job(here, monkeypatch):
    from megatron_autorecompute.compat import model_layers

    config, layout = model_layers.unwrapped(here[0][0]).config, Layout.from_flags(4, 1)
    before = described(*here, layout)
    for name, value in settings().items():
        with monkeypatch.context() as patch:
            patch.setattr(config, name, value)
            assert differing(before, described(*here, layout)) == {name}
    assert differing(before, described(*here, Layout.from_flags(4, 2))) == {"layers"}
    for name in ("NVTE_FUSED_ATTN", "CUBLAS_WORKSPACE_CONFIG", "TORCHDYNAMO_DISABLE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "other")
            assert differing(before, described(*here, layout)) == {name}


def test_numbers_that_change_neither_bytes_nor_times_make_no_other_job(here):
    chunks, optimizer = job(layernorm_epsilon=1e-6, init_method_std=0.01)
    optimizer.config.adam_eps = 1e-6
    assert differing(described(*here), described(chunks, optimizer)) == set()


@pytest.mark.any_version
def test_what_only_megatrons_arguments_say_makes_another_job_too():
    given = {"decoder_seq_length": None, "create_attention_mask_in_dataloader": True, "sft": False}
    before = shapes_of(Namespace(**given))
    assert before == {"create_attention_mask_in_dataloader": "True", "sft": "False"}
    for name, value in (("decoder_seq_length", 8), ("create_attention_mask_in_dataloader", False)):
        assert differing(before, shapes_of(Namespace(**given | {name: value}))) == {name}
    bridge = Namespace(dist=Namespace(use_tp_pp_dp_mapping=False), dataset=None)
    before = megatron_bridge.shapes_of(bridge)
    bridge.dist.use_tp_pp_dp_mapping = True
    assert differing(before, megatron_bridge.shapes_of(bridge)) == {"dist.use_tp_pp_dp_mapping"}


def test_what_a_running_job_sets_and_what_changes_numbers_only_is_the_same_job(here, monkeypatch):
    from megatron_autorecompute.compat import model_layers

    (chunk,), optimizer = here
    config, before = model_layers.unwrapped(chunk).config, described(*here)
    monkeypatch.setattr(config, "no_sync_func", None)
    monkeypatch.setattr(config, "finalize_model_grads_func", lambda: None)
    monkeypatch.setattr(config, "timers", object())
    monkeypatch.setattr(optimizer.config, "lr", 0.5)
    monkeypatch.setattr(optimizer.config, "clip_grad", 0.5)
    chunk.eval()
    assert described(*here) == before
    chunk.train()


def test_a_model_of_another_vocabulary_and_frozen_parameters_are_another_job(here, one_rank):
    before, (chunks, optimizer) = described(*here), job()
    next(chunks[0].parameters()).requires_grad_(False)
    assert differing(before, described(chunks, optimizer)) == {"modules"}
