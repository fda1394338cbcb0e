"""Small models of every sort that CPU cannot run, and a short training run of one."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.cases import DENSE, DENSE_TE, MLA, MOE, Case, built
from benchmarks.gpu.contest import own_choices
from megatron_autorecompute.compat import model_layers, stage_layout
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.runtime.model_shard import ModelShard

STEPS = 2


def small(case: Case, seq_length: int = 128, **fields: Any) -> Case:
    """The case in four layers; tiny, and of local layers, off CUDA."""
    if not torch.cuda.is_available():
        return replace(case.sized(True), fields={**case.fields, **case.tiny_fields, **fields})
    shape = replace(
        case.shape,
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=seq_length,
        micro_batch_size=2,
    )
    return replace(case, shape=shape, fields={**case.fields, **fields})


def fp8(case: Case, recipe: str) -> Case:
    return small(case, fp8="hybrid", fp8_recipe=recipe)


LOCAL = {
    "dense, unfused attention": lambda: small(DENSE),
    "dense with linear biases": lambda: small(DENSE, add_bias_linear=True),
}
TE = {
    "TE dense": lambda **fields: small(DENSE_TE, **fields),
    "TE dense with RMSNorm": lambda: small(DENSE_TE, normalization="RMSNorm"),
    "TE grouped experts": lambda **fields: small(MOE, **fields),
    "TE multi-latent attention": lambda **fields: small(MLA, **fields),
    "TE fp8 with current scaling": lambda: fp8(DENSE_TE, "tensorwise"),
    "TE fp8 with blocks": lambda: fp8(DENSE_TE, "blockwise"),
    "TE fp8 with delayed scaling": lambda: fp8(DENSE_TE, "delayed"),
    "TE fp8 experts": lambda: fp8(MOE, "tensorwise"),
}


def gated_delta_net(*, deterministic: bool = True) -> Case:
    """Linear attention by torch alone, or by fla's kernels, which promise no equal bits."""
    return replace(
        small(
            DENSE,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=[1, 1, 1, 1],
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            activation_func=torch.nn.functional.silu,
            deterministic_mode=deterministic,
        ),
        layers="gated delta net",
    )


@dataclass(frozen=True)
class Run:
    """Losses of all steps; the last step's gradients and the weights after it."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def differences(self, other: "Run") -> list[str]:
        """What differs by as much as one bit."""
        found = [] if self.losses == other.losses else [f"losses {self.losses} {other.losses}"]
        for what in ("gradients", "weights"):
            mine, theirs = getattr(self, what), getattr(other, what)
            assert mine.keys() == theirs.keys()
            found += [f"{what} {n}" for n in mine if not torch.equal(mine[n], theirs[n])]
        return found


def trained(case: Case, policy: str, steps: int = STEPS) -> Run:
    """A few steps from the same seed under a policy, dropout 0.1."""
    job = built(case)
    with job.strategy(policy):
        losses = [job.step() for _ in range(steps)]
    named = dict(model_layers.unwrapped(job.chunks[0]).named_parameters())
    return Run(
        losses,
        {name: parameter.main_grad.clone() for name, parameter in named.items()},
        {name: parameter.detach().clone() for name, parameter in named.items()},
    )


def policies(case: Case, mixes: int = 6) -> list[str]:
    """Every choice that all layers have, on all of them; then random mixes, groups among them."""
    job = built(case)
    found = ModelShard(job.chunks).own_kinds
    choices = [c for c in found[0].choices if all(c in kind.choices for kind in found)]
    layers = [layer for layer, _ in model_layers.numbered_layers(job.chunks)]
    choices = list(dict.fromkeys([*choices, *own_choices(layers)]))
    num_layers = stage_layout.num_policy_layers(job.config)
    uniform = [RecomputePolicy((choice,) * num_layers) for choice in choices]
    chance = random.Random(1)
    mixed = [
        RecomputePolicy(
            (
                *(LayerPolicy("full", group=2),) * 2,
                *(chance.choice(choices) for _ in range(num_layers - 2)),
            )
        )
        for _ in range(mixes)
    ]
    return [policy.format() for policy in (*uniform, *mixed)]


def different(case: Case) -> dict[str, list[str]]:
    """What differs from a run without recompute, by policy."""
    reference = trained(case, "megatron:none")
    found = {text: trained(case, text).differences(reference) for text in policies(case)}
    assert len(found) > 2
    return {text: what for text, what in found.items() if what}
