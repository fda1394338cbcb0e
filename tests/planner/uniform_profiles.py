"""Profiles of one kind of layers."""

from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StaticBytes,
)

NOTHING = ChoiceRecord("none", 0, 0, 0, 0.0, 0.0)
NONE = ChoiceRecord("none", 100, 10, 30, 10.0, 20.0)
FULL = ChoiceRecord("full", 4, 20, 130, 10.0, 30.0)


def uniform_profile(num_layers, *choices, head=NOTHING, boundary_bytes=0, mtp=0):
    kind = LayerKind("k", tuple(range(num_layers + mtp)), choices, static=StaticBytes())
    return Profile(
        Model("uniform", num_layers, mtp),
        Parallelism(1, 8),
        (kind,),
        embedding=NOTHING,
        head=head,
        boundary_bytes=boundary_bytes,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )


def peak_of(profile, layout, schedule, text, stage=0):
    policy = RecomputePolicy.parse(text, num_layers=profile.num_layers)
    return evaluate(profile, layout, schedule, policy).stages[stage].peak
