"""Flags of searched layouts, read by the parser of Megatron's own pretrain_gpt.py."""

import importlib.util
import os

import pytest
import torch

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.meta.flags import job_from_flags
from megatron_autorecompute.planner.cost.layout_flags import layers_per_stage, layout_flags
from tests.planner.asked import searched_layouts

SMALL_JOB = (
    "--hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --bf16 "
    "--micro-batch-size 1 --vocab-size 32 --train-iters 1 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --untie-embeddings-and-output-weights "
    "--position-embedding-type rope"
)


# Megatron warns while it is imported without Transformer Engine.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Only transformer-engine:UserWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="this megatron-core comes without megatron.training",
    ),
]


@pytest.mark.parametrize(
    ("sizes", "chunks", "depths"),
    [
        ((0, 3, 1), 1, 0),
        ((2, 3, 1), 1, 1),
        ((2, 1, 1, 0), 1, 0),
        ((3, 1), 1, 0),
        ((2, 6, 4), 2, 0),
        ((2, 6), 2, 1),
    ],
)
def test_megatrons_parser_accepts_them_and_reads_the_planned_layout(sizes, chunks, depths):
    layers, stages = sum(sizes), len(sizes)
    own = [*sizes[:-1], sizes[-1] + depths]
    every = searched_layouts(stages, chunks, layers, depths)
    (layout,) = (one for one in every if layers_per_stage(one) == own)
    words = f"{SMALL_JOB} --num-layers {layers} --pipeline-model-parallel-size {stages} "
    words += f"--global-batch-size {4 * stages}" + f" --mtp-num-layers {depths}" * bool(depths)
    flags = [word for pair in layout_flags(layout).items() for word in pair]
    assert job_from_flags([*words.split(), *flags], stages).layout() == layout


def test_a_deterministic_job_leaves_no_trace_in_the_process_that_reads_its_flags():
    words = f"{SMALL_JOB} --num-layers 1 --global-batch-size 1 --deterministic-mode".split()
    before = dict(os.environ)
    assert job_from_flags(words, 1).config["deterministic_mode"]
    assert dict(os.environ) == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_bad_pattern_among_flags_is_refused_by_position_and_symbol():
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model")
    words = f"{SMALL_JOB} --global-batch-size 4 --spec a b --hybrid-layer-pattern".split()
    for pattern, said in (("M-X*", "'X' at position 2 is no layer"), ("", "has no layers before")):
        with pytest.raises(PipelineError, match=said):
            job_from_flags([*words, pattern], 1)
