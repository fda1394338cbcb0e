"""LoRA's adapters on a model of stand-ins, where Megatron Bridge puts them.

Bridge freezes every parameter and wraps each module whose own or full name one of `target_modules`
says, experts' included (peft/base.py, lora.py, module_matcher.py). Adapters are products of
Megatron's own linear layers, in 16 bits under every precision (peft/utils.py
`ParallelLinearAdapter`), and these run here as they are.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.job import Job


class Adapter(torch.nn.Module):
    """B A x of one linear layer. Saves: its input, whole under sequence parallelism, and A's
    result; with dropout its mask and what it left. Experts of a rank share one adapter."""

    def __init__(self, of: Any, rank: int, dropout: float) -> None:
        super().__init__()
        config = copy.copy(of.config)
        config.sequence_parallel = False
        more = {
            "config": config,
            "bias": False,
            "init_method": lambda weight: weight,
            "is_expert": of.is_expert,
            "tp_group": of.group,
        }
        parts = {"input_is_parallel": True, "skip_bias_add": True}
        self.linear_in: torch.nn.Module
        if of.parallel == "row":
            self.linear_in = RowParallelLinear(of.inputs, rank, **parts, **more)
        else:
            reduced = not of.config.sequence_parallel
            self.linear_in = ColumnParallelLinear(
                of.inputs, rank, gather_output=True, disable_grad_reduce=not reduced, **more
            )
        whole = of.parallel != "column"
        self.linear_out = ColumnParallelLinear(rank, of.outputs, gather_output=whole, **more)
        self.dropout, self.group = dropout, of.group
        self.gathers, self.scatters = of.gathers and of.shares != "gathered", of.scatters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as the linear layer multiplies it, to a tensor like its output."""
        if self.dropout:
            x = torch.nn.functional.dropout(x, self.dropout)
        if self.gathers:
            x = gather_from_sequence_parallel_region(x, group=self.group)
        low, _ = self.linear_in(x)
        y, _ = self.linear_out(low)
        if self.scatters:
            y = scatter_to_sequence_parallel_region(y, group=self.group)
        return y * 2.0  # alpha / rank, whatever it is


def add_adapters(job: Job, model: Any) -> None:
    """Freeze a model of stand-ins and give it the job's adapters."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, kernels.LinearModule) and _is_target(job, name):
            module.adapter = Adapter(module, job.lora_rank, job.lora_dropout)
    if getattr(model, "pre_process", False):
        # As on every stage but the first, and on the first by Bridge's peft/recompute.py.
        model.embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether a layer of the model was given one."""
    return any(isinstance(module, Adapter) for module in model.modules())


def _is_target(job: Job, name: str) -> bool:
    # Bridge's `ModuleMatcher.match` and `wildcard_match`.
    own = name.rpartition(".")[-1]
    return any(
        own == target or re.fullmatch(target.replace("*", "(.*)"), name)
        for target in job.lora_target_modules
    )
