"""Megatron's TEGroupedMLP on CPU: its two grouped linear layers, one product for each expert."""

import functools
from contextlib import contextmanager
from unittest import mock

import torch


class GroupedLinear(torch.nn.Module):
    """What TEGroupedMLP needs of TEColumnParallelGroupedLinear and TERowParallelGroupedLinear."""

    def __init__(self, num_gemms, input_size, output_size, *, config, bias, **_):
        super().__init__()
        assert not bias
        for number in range(num_gemms):
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
            torch.nn.init.normal_(weight, std=0.02)
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight))

    def forward(self, hidden_states, tokens_per_expert):
        parts = hidden_states.split(tokens_per_expert)
        pairs = zip(parts, self.parameters(), strict=True)
        return torch.cat([torch.nn.functional.linear(*pair) for pair in pairs]), None


@contextmanager
def grouped_experts():
    """In this block the local backend builds grouped experts where moe_grouped_gemm is set."""
    from megatron.core.models.backends import LocalSpecProvider

    usual = LocalSpecProvider.grouped_mlp_modules

    def modules(self, moe_use_grouped_gemm, *legacy):
        if moe_use_grouped_gemm:
            return _grouped_mlp(GroupedLinear, GroupedLinear)
        return usual(self, moe_use_grouped_gemm, *legacy)

    with mock.patch.object(LocalSpecProvider, "grouped_mlp_modules", modules):
        yield


def _grouped_mlp(linear_fc1, linear_fc2):
    """What `grouped_mlp_modules` returns: a pair through 0.17, since 0.18 a builder."""
    from megatron.core.transformer.moe import experts

    linears = {"linear_fc1": linear_fc1, "linear_fc2": linear_fc2}
    submodules = getattr(experts, "GroupedMLPSubmodules", None)
    if submodules is None:
        return experts.TEGroupedMLP, experts.MLPSubmodules(**linears)
    return functools.partial(experts.TEGroupedMLP, submodules=submodules(**linears))
