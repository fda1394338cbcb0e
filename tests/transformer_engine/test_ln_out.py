"""`selective[ln_out]` on one of Transformer Engine's linears, in the passes that a job may run."""

import copy

import pytest
import torch

from megatron_autorecompute.runtime.norm_again import NormAgain

pytestmark = pytest.mark.usefixtures("one_rank")
SHAPES = ((8, 2), (8, 2), (5, 2), (16, 1))
"""Sequences and micro-batches of the passes in flight; their length varies."""


@pytest.fixture(params=["RMSNorm", "LayerNorm"])
def linear(one_rank, request):
    from transformer_engine.pytorch import LayerNormLinear

    bf16 = torch.bfloat16
    return LayerNormLinear(16, 24, normalization=request.param, params_dtype=bf16, device="cpu")


def passes(linear, backwards):
    """Outputs, and gradients of inputs and parameters, of four forwards whose backwards run in
    another order; of a forward without a backward, and of an evaluation among them."""
    generator = torch.Generator().manual_seed(3)
    width = linear.weight.shape[1]
    xs = [torch.randn(*shape, width, generator=generator).bfloat16() for shape in SHAPES]
    xs = [x.requires_grad_() for x in xs]
    for parameter in linear.parameters():
        parameter.grad = None
    outputs = [linear(x) for x in xs]
    linear(xs[0])
    with torch.no_grad():
        evaluated = linear(xs[1])
    for number in backwards:
        outputs[number].float().square().sum().backward()
    gradients = [each.grad for each in (*xs, *linear.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [evaluated, *outputs, *gradients]


def held(linear):
    """Bytes of what a forward saved, its input and the parameters left out."""
    known = {each.untyped_storage()._cdata for each in linear.parameters()}
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(8, 2, linear.weight.shape[1]).bfloat16().requires_grad_()
    known.add(x.untyped_storage()._cdata)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        linear(x)
    return sum(size for storage, size in storages.items() if storage not in known)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backwards", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_passes_in_flight_and_lost_ones_keep_their_bits(linear, backwards):
    reference = passes(linear, backwards)
    ours = NormAgain(linear)
    assert same(passes(linear, backwards), reference)
    assert same(passes(linear, backwards), reference)
    ours.undo()
    assert "forward" not in vars(linear)
    assert same(passes(linear, backwards), reference)


def test_a_copy_runs_its_own_norm_and_product(linear):
    """Transformer Engine's linears can be copied without a process group, and not be pickled."""
    reference = passes(linear, (0, 1, 2, 3))
    ours = NormAgain(linear)
    other = copy.deepcopy(linear)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.zero_()
    ours.undo()
    assert isinstance(vars(other)["forward"], NormAgain)
    assert same(passes(other, (0, 1, 2, 3)), reference)


def test_an_input_changed_between_forward_and_backward_is_not_read_in_silence(linear):
    NormAgain(linear)
    x = torch.randn(8, 2, linear.weight.shape[1]).bfloat16().requires_grad_()
    output = linear(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        output.float().sum().backward()


def test_under_somebody_elses_hooks_the_norm_runs_once_and_bits_are_equal(linear):
    reference = passes(linear, (0, 1, 2, 3))
    without = held(linear)
    NormAgain(linear)
    assert held(linear) == without
    with torch.autograd.graph.save_on_cpu():
        assert same(passes(linear, (0, 1, 2, 3)), reference)


def test_a_frozen_weight_holds_no_norm_in_any_case(linear):
    linear.weight.requires_grad_(False)
    NormAgain(linear)
    x = torch.randn(8, 2, linear.weight.shape[1]).bfloat16().requires_grad_()
    linear(x).float().sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
