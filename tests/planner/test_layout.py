"""Hand-derived facts and properties of layouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.layout import Chunk, Layout


def test_even_layout_deals_chunks_round_the_stages():
    layout = Layout.from_flags(8, 2, 2)
    assert layout.stages == (
        (Chunk((0, 1), embedding=True), Chunk((4, 5))),
        (Chunk((2, 3)), Chunk((6, 7), head=True)),
    )
    assert layout.chunk_layers() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (layout.num_stages, layout.num_chunks, layout.num_layers) == (2, 2, 8)


def test_one_stage_holds_everything():
    assert Layout.from_flags(3, 1).stages == ((Chunk((0, 1, 2), embedding=True, head=True),),)


def test_accounting_for_embedding_and_loss_takes_a_layer_from_the_ends():
    # 126 layers with both on 16 stages of 8 chunks, as Llama 3.1 405B is trained.
    layout = Layout.from_flags(
        126,
        16,
        8,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert [len(chunk.layers) for chunk in layout.stages[0]] == [0] + [1] * 7
    assert [len(chunk.layers) for chunk in layout.stages[15]] == [1] * 7 + [0]
    assert layout.stages[0][0].embedding
    assert layout.stages[15][7].head
    assert layout.stages[1][0].layers == (0,)


def test_first_and_last_stage_may_have_their_own_number_of_layers():
    layout = Layout.from_flags(
        61, 8, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=9
    )
    assert [len(chunk.layers) for (chunk,) in layout.stages] == [4] + [8] * 6 + [9]


def test_mtp_depths_follow_the_last_layer_on_the_last_chunk():
    layout = Layout.from_flags(8, 2, 2, mtp_num_layers=2)
    assert layout.stages[1][1] == Chunk((6, 7, 8, 9), head=True)
    assert (layout.num_layers, layout.mtp_num_layers) == (8, 2)


def test_layout_text_is_unrolled_and_dealt_round_the_stages():
    layout = Layout.parse("Et*3|(tt|)*6mL", 4, 2)
    assert layout.stages[0] == (Chunk((0, 1, 2), embedding=True), Chunk((9, 10)))
    assert layout.stages[3] == (Chunk((7, 8)), Chunk((15,), head=True))
    assert (layout.num_layers, layout.mtp_num_layers) == (15, 1)


def test_layout_text_may_leave_stages_empty_and_mtp_in_a_chunk_of_its_own():
    layout = Layout.parse("E||t*4,|t*4|m|L", 6)
    assert layout.chunk_layers() == ((), (), (0, 1, 2, 3), (4, 5, 6, 7), (8,), ())
    assert [chunk.head for (chunk,) in layout.stages] == [False] * 5 + [True]


def test_layout_list_reads_like_the_text():
    rows = [["embedding", "decoder"], ["Decoder"], [" decoder "], ["decoder", "mtp", "loss"]]
    listed = Layout.from_flags(4, 2, mtp_num_layers=1, pipeline_model_parallel_layout=rows)
    assert listed == Layout.parse("Et|t|t|tmL", 2, 2)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_every_layer_stands_exactly_once(p, v, per_chunk, mtp):
    v = v if p > 1 else 1
    layout = Layout.from_flags(p * v * per_chunk, p, v, mtp_num_layers=mtp)
    assert sorted(sum(layout.chunk_layers(), ())) == list(range(p * v * per_chunk + mtp))


placed = Layout.from_flags
parse = Layout.parse
REFUSED = [
    (lambda: placed(0, 1), "num_layers is 0; it must be at least 1"),
    (lambda: placed(8, 0), "pp is 0"),
    (lambda: placed(8, 2, 0), "vp is 0"),
    (lambda: placed(8, 2, mtp_num_layers=-1), "mtp_num_layers is -1"),
    (lambda: placed(10, 4), "10 of 10 layers cannot be divided evenly among 4 of 4 stages"),
    (lambda: placed(8, 4, 4), "2 layers of a stage cannot be divided evenly among 4 chunks"),
    (lambda: placed(8, 1, 2), "2 chunks on a single stage"),
    (
        lambda: placed(7, 4, num_layers_in_first_pipeline_stage=2),
        "5 of 7 layers cannot be divided evenly among 3 of 4",
    ),
    (lambda: placed(8, 4, num_layers_in_first_pipeline_stage=0), "8 of 8 layers cannot be"),
    (
        lambda: placed(8, 4, num_layers_in_last_pipeline_stage=8),
        "0 of 8 layers cannot be divided evenly among 3 of 4",
    ),
    (lambda: placed(8, 4, num_layers_in_last_pipeline_stage=11), "-3 of 8 layers cannot"),
    (
        lambda: placed(
            8, 1, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=4
        ),
        "among -1 of 1 stages",
    ),
    (
        lambda: placed(
            7,
            2,
            num_layers_in_first_pipeline_stage=3,
            account_for_loss_in_pipeline_split=True,
        ),
        "keep one",
    ),
    (
        lambda: placed(
            1,
            1,
            account_for_loss_in_pipeline_split=True,
            pipeline_model_parallel_layout="EtL",
        ),
        "keep one",
    ),
    (
        lambda: placed(2, 2, pipeline_model_parallel_layout="Et|tL", vp=2),
        "do not make 2 stages of 2",
    ),
    (lambda: placed(3, 2, pipeline_model_parallel_layout="Et|tL"), "has 2 layers and 0 MTP depths"),
    (
        lambda: placed(2, 2, mtp_num_layers=1, pipeline_model_parallel_layout="Et|tL"),
        "the model has 2 and 1",
    ),
    (
        lambda: placed(1, 1, pipeline_model_parallel_layout=[["embedding", "layer"]]),
        "Unknown layer 'layer'",
    ),
    (lambda: parse("Et|t|tL", 2), "has 3 chunks, which do not make 2 stages"),
    (lambda: parse("EtxL", 1), "has 'x' where only"),
    (lambda: parse("E(t|tL", 2), "has '\\(' where only"),
    (lambda: parse("Et*9999999L", 1), "more than 10000 symbols"),
    (
        lambda: placed(
            8, 2, 2, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=4
        ),
        "divides by the number of stages between them",
    ),
    (lambda: parse("E|L", 2), "at least one"),
    (lambda: parse("Et|t", 2), "one L last"),
    (lambda: parse("tE|tL", 2), "one E first"),
    (lambda: parse("Et|EtL", 2), "one E first"),
    (lambda: parse("Em|tL", 2), "then m"),
    (lambda: parse("Et|mt|tL", 3), "then m"),
    (lambda: parse("Et|tm|mL", 3), "all MTP depths \\(m\\) in one chunk"),
    (lambda: parse("Et|tm|L|", 2), "last chunk of its stage"),
    (lambda: parse("Et|t|t|L", 1), "4 chunks on a single stage"),
    (lambda: Layout(()), "at least one stage"),
    (lambda: Layout(((Chunk((0,)),), (Chunk((1,)), Chunk((2,))))), "same number of chunks"),
    (lambda: Layout(((Chunk((1,)),), (Chunk((0,)),))), "in model order"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_megatron_refuses_is_refused_and_said(ask, message):
    with pytest.raises(PipelineError, match=message):
        ask()
