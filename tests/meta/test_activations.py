"""What activation functions and experts' biases keep, against Megatron's own functions."""

import pytest

from megatron_autorecompute.errors import OptionError
from tests.meta.test_no_device import FFN, HIDDEN, MOE, SEQUENCE, dense_held_bytes, job, records

ROWS = 2 * SEQUENCE  # two experts for each token
WIDTH = MOE["moe_ffn_hidden_size"]
PLAIN = {"gated_linear_unit": False}
GATED_INPUT = 2 * 2 * SEQUENCE * FFN


def held(config, kind=0, choice="none", **fields):
    only = () if choice == "none" else ("moe_act",)
    return records(config, kind, only, **fields)[choice].held_bytes


@pytest.mark.parametrize(
    ("activation", "kept"),
    [
        ("relu", 0),  # its output, which the projection keeps too
        ("squared_relu", 2 * SEQUENCE * FFN),  # relu's output; and the square, as for relu
        ("gelu", 2 * SEQUENCE * FFN),  # its input
    ],
)
def test_an_activation_without_gate_keeps_one_tensor_of_the_width(activation, kept):
    without = dense_held_bytes() - GATED_INPUT
    assert held({**PLAIN, "activation_func": activation}) == without + kept


def test_a_gelu_with_its_bias_is_one_kernel_that_keeps_its_input():
    biased = {**PLAIN, "add_bias_linear": True, "activation_func": "gelu"}
    found, apart = (
        records({**biased, "bias_activation_fusion": fusion}, only=())["none"]
        for fusion in (True, False)
    )
    assert found.held_bytes == dense_held_bytes() - GATED_INPUT + 2 * SEQUENCE * FFN
    assert found.forward_transient_bytes <= apart.forward_transient_bytes


EXPERTS = {**MOE, "moe_grouped_gemm": True}


@pytest.mark.any_version
@pytest.mark.parametrize("choice", ["none", "selective[moe_act]"])
def test_a_weighted_squared_relu_in_one_kernel_keeps_its_input_alone(choice):
    squared = {**EXPERTS, **PLAIN, "activation_func": "squared_relu"}
    fused = held({**squared, "use_fused_weighted_squared_relu": True}, 1, choice)
    apart = held(squared, 1, choice)
    # In two: relu's output in place of the input, and the square, for the weights' gradient.
    assert apart - fused == (2 * ROWS * WIDTH if choice == "none" else 0)


@pytest.mark.any_version
def test_a_clamp_keeps_what_it_clamped_beside_its_input():
    # Megatron fuses quick_gelu in experts only.
    experts = {**EXPERTS, "moe_layer_freq": 1}
    quick = {**experts, "activation_func": "quick_gelu"}
    clamped = held({**quick, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0})
    swiglu = held(experts)
    assert held(quick) - swiglu in range(0, 17)  # an offset for each layer
    assert clamped - swiglu - 2 * ROWS * 2 * WIDTH in range(0, 17)


@pytest.mark.any_version
def test_an_input_stored_in_fp8_takes_half():
    gain = held(EXPERTS, 1) - held({**EXPERTS, "activation_func_fp8_input_store": True}, 1)
    assert gain == ROWS * 2 * WIDTH


@pytest.mark.any_version
def test_biases_of_experts_are_added_to_copies_of_the_output():
    biased = records({**EXPERTS, "add_bias_linear": True}, 1, ())["none"]
    without = records(EXPERTS, 1, ())["none"]
    # The router's weights, saved with the biases, are there already.
    assert biased.held_bytes - without.held_bytes < 0.01 * without.held_bytes
    more = biased.forward_transient_bytes - without.forward_transient_bytes
    assert more >= 2 * ROWS * HIDDEN


def test_an_unknown_activation_is_refused_with_those_that_are_known():
    with pytest.raises(
        OptionError, match=r"must be 'gelu', 'silu', 'relu', 'squared_relu', 'quick_gelu'"
    ):
        job({"activation_func": "swish"})
