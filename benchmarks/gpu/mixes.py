"""Random mixed policies: what fidelity is tested on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_autorecompute.policy import FULL, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile


def random_policies(profile: Profile, count: int, seed: int = 1) -> list[RecomputePolicy]:
    """Uniform policies first, one a choice, then runs of random choices, groups among them.

    All different, in an order that depends on the seed alone.
    """
    chance = random.Random(seed)
    shared = [
        LayerPolicy.parse(record.choice)
        for record in profile.kinds[0].choices
        if all(kind.record(record.choice) for kind in profile.kinds)
    ]
    found = {RecomputePolicy((choice,) * profile.num_layers): None for choice in shared}
    while len(found) < count:
        found[_mix(profile, shared, chance)] = None
    return list(found)[:count]


def _mix(profile: Profile, shared: Sequence[LayerPolicy], chance: random.Random) -> RecomputePolicy:
    layers: list[LayerPolicy] = []
    while (left := profile.num_layers - len(layers)) > 0:
        run = chance.randint(1, left)
        choice = chance.choice(shared)
        if choice == FULL and run > 1 and chance.random() < 0.5:
            group = chance.randint(2, run)
            choice, run = LayerPolicy("full", group=group), run - run % group
        layers += [choice] * run
    return RecomputePolicy(tuple(layers))
