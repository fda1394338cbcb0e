"""Weight gradients that a product adds itself, as Transformer Engine's do."""

import pytest
import torch

from megatron_autorecompute.meta.model import add_main_gradients


class FusedLinear(torch.autograd.Function):
    """y = x W^T, whose backward adds the weight's gradient to main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        ctx.parameter = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.main_grad.add_(gradient.T @ x)
        dummy = None
        if hasattr(ctx.parameter, "grad_added_to_main_grad"):
            ctx.parameter.grad_added_to_main_grad = True
            dummy = torch.full_like(weight, float("nan"))  # which nobody may read
        return gradient @ weight, dummy


@pytest.mark.parametrize("dummies", [False, True])
def test_what_the_product_added_is_not_added_again(dummies):
    x = torch.randn(3, 4, requires_grad=True)
    fused, plain = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    mains = add_main_gradients([fused, plain], dummies=dummies)
    hidden = FusedLinear.apply(x, fused)
    (hidden @ plain.T).sum().backward()
    assert torch.allclose(mains[0], (torch.ones(3, 4) @ plain.detach()).T @ x.detach())
    assert torch.allclose(mains[1], torch.ones(3, 4).T @ hidden.detach())
    assert fused.grad is plain.grad is None
