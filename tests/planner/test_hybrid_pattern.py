from types import SimpleNamespace

import pytest

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern, check_flags
from megatron_autorecompute.planner.cost.layout import Layout

pytestmark = pytest.mark.any_version


def layout(pattern, pp, vp=None, **fields):
    return Layout.from_pattern(HybridPattern.parse(pattern), pp, vp, **fields)


def test_a_pattern_has_segments_families_and_depths():
    pattern = HybridPattern.parse("M-|*E|/*E/*E")
    assert pattern.segments == ("M-", "*E", "")
    assert pattern.families == ("mamba", "mlp", "attention", "moe")
    assert (pattern.num_layers, pattern.depth, pattern.mtp_num_layers) == (4, "*E", 2)
    assert str(pattern) == "M-|*E|/*E/*E"


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("M-x*", "'x' at position 2 is no layer"),
        ("*-[*-]", "'[' at position 2 is no layer"),
        ("*-/*|-", "'|' at position 4 is no layer"),
        ("M*-+", "'*' at position 1 and '+' at position 3"),
        ("M-/*D", "'*' at position 3 and 'D' at position 4"),
        ("*-/*-/**", "MTP depth 1 is '**', and depth 0 is '*-'"),
        ("|/*-", "has no layers before the first /"),
    ],
)
def test_what_megatron_does_not_build_is_refused_by_position_and_symbol(pattern, said):
    with pytest.raises(PipelineError) as error:
        HybridPattern.parse(pattern)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((3, 0), "has 4 layers and 0 MTP depths (after /); num_layers is 3, mtp_num_layers 0"),
        ((6, 0), "num_layers is 6, mtp_num_layers 0. Set them to these"),
        ((4, 1), "0 MTP depths (after /); num_layers is 4, mtp_num_layers 1"),
    ],
)
def test_a_pattern_of_other_numbers_than_the_config_is_refused(numbers, said):
    with pytest.raises(PipelineError) as error:
        HybridPattern.parse("*-*-").check_numbers(*numbers)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            lambda: layout("*-|*-|*-", 2),
            "3 segments, separated by |, which do not make 2 stages. Write a multiple of 2.",
        ),
        (
            lambda: layout("*-|*-", 2, 2),
            "has 2 segments, separated by |, which do not make 2 stages of 2 chunks. Write 4.",
        ),
        (
            lambda: check_flags(
                SimpleNamespace(hybrid_layer_pattern="*-||*-/*", pipeline_model_parallel_size=2)
            ),
            "3 segments, separated by |, which do not make 2 stages. Write a multiple of 2.",
        ),
        (lambda: layout("*-*-", 2, 2), "has no |, so Megatron builds one chunk per stage"),
        (
            lambda: layout("*-|*-", 2, num_layers_in_first_pipeline_stage=1),
            "places layers by |, beside num_layers_in_first/last_pipeline_stage",
        ),
        (
            lambda: layout("*-*", 2),
            "3 of 3 layers cannot be divided evenly among 2 of 2",
        ),
    ],
)
def test_stages_that_a_pattern_does_not_fill_are_refused(asked, said):
    with pytest.raises(PipelineError) as error:
        asked()
    assert said in str(error.value)
