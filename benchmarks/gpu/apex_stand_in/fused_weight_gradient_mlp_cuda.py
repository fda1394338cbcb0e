"""Apex's CUDA extension of this name by torch's own product: the same sum into `main_grad`, which
takes no memory besides. For machines that Apex cannot be built on; seen by part 8's jobs only.
"""

import torch


def wgrad_gemm_accum_fp32(
    inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output^T · inputs, [out, tokens] x [tokens, in], to main_grad, [out, in] in fp32."""
    product = grad_output.reshape(-1, grad_output.shape[-1]).t()
    rows = inputs.reshape(-1, inputs.shape[-1])
    torch.addmm(main_grad, product, rows, out_dtype=torch.float32, out=main_grad)
