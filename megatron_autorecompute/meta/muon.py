"""What Muon computes at the end of a step: Newton-Schulz iterations over every matrix it trains.

NVIDIA-NeMo/Emerging-Optimizers `orthogonalized_optimizers/muon_utils.py` (`newton_schulz`,
`newton_schulz_step`) and `orthogonalized_optimizer.py` (`step`), which megatron-core's
`optimizer/emerging_optimizers.py` `TensorParallelMuon` calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_autorecompute.meta.devices import Device, Efficiency

if TYPE_CHECKING:
    import torch

ITERATIONS = 5
"""Megatron's default of `muon_num_ns_steps`."""
KERNELS = 10 + 3 * ITERATIONS
"""For each matrix: weight decay, momentum, its norm, the clamp and the division, to bf16 and back,
two scales, the update; of every iteration X X^T and two `addmm`."""
VIEWS = 5 + ITERATIONS
"""Transposes and the expanded norm, which the host makes too."""
CALLS = 4 + ITERATIONS
"""Functions in Python around these kernels: `orthogonalize`, `scaled_orthogonalize_fn`,
`newton_schulz_tp`, `newton_schulz`, and `newton_schulz_step` for every iteration."""
BYTES = 90
"""Moved for each of its parameters by these kernels but the iterations': weight decay (8), momentum
(12), normalised (12), to bf16 and back (12), scaled twice (16), added to the master weight (12); by
Megatron the gradient's norm and its clipping (12), the weight written (6)."""


@dataclass(frozen=True, slots=True)
class Orthogonalized:
    """Matrices, and the floating-point operations of one iteration over all of them."""

    matrices: int = 0
    flops: int = 0

    def __add__(self, other: Orthogonalized) -> Orthogonalized:
        return Orthogonalized(self.matrices + other.matrices, self.flops + other.flops)

    def of_rank(self, ranks: int) -> tuple[float, float]:
        """Matrices and floating-point operations of the fullest of so many ranks, which have whole
        matrices (megatron-core optimizer/layer_wise_optimizer.py)."""
        used = min(ranks, self.matrices) or 1
        return -(-self.matrices // used), self.flops / used


NO_MATRICES = Orthogonalized()


def orthogonalized(weight: torch.Tensor, rows: Sequence[int]) -> Orthogonalized:
    """A weight [out, in], or the experts' [experts, out, in]; rows: of the matrices it is split
    into. As much of it as this rank has: Megatron's default `muon_tp_mode` is blockwise."""
    experts = weight.shape[0] if weight.dim() == 3 else 1
    flops = sum(iteration_flops(each, weight.shape[-1]) for each in rows)
    return Orthogonalized(experts * len(rows), experts * flops)


def iteration_flops(rows: int, columns: int) -> int:
    """A = X X^T along the shorter side, B = bA + cAA, X = aX + BX."""
    short, long = sorted((rows, columns))
    return 4 * short**2 * long + 2 * short**3


def split_rows(part: torch.nn.Module) -> dict[int, tuple[int, ...]]:
    """Rows of query, key and value by the weight's id, where they are one weight that Muon splits
    (`muon_split_qkv`)."""
    return dict(_split_rows(part))


def _split_rows(part: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    for module in part.modules():
        joint: Any = getattr(module, "linear_qkv", None)
        if joint is None:
            continue
        query, key = module.query_projection_size, module.kv_projection_size
        rows = joint.weight.shape[0]
        keys = rows * int(key) // (int(query) + 2 * int(key))
        yield id(joint.weight), (rows - 2 * keys, keys, keys)


def muon_ms(
    device: Device, efficiency: Efficiency, found: Orthogonalized, parameters: int, ranks: int
) -> float:
    """Milliseconds of the fullest rank: of kernels, whose products reach what large ones do, or of
    the host that starts them, if that takes longer."""
    matrices, flops = found.of_rank(ranks)
    moved = BYTES * parameters / min(ranks, found.matrices or 1)
    each_us = (KERNELS + VIEWS) * efficiency.host_us + CALLS * efficiency.module_us
    seconds = moved / (device.bandwidth_bytes * efficiency.bandwidth)
    seconds += ITERATIONS * flops / (device.rate("bf16") * efficiency.gemm)
    seconds += matrices * KERNELS * efficiency.kernel_us * 1e-6
    return max(1e3 * seconds, 1e-3 * matrices * each_us)
