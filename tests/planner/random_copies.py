"""Random chunks whose layers copy groups to host memory."""

from megatron_autorecompute.planner.cost.copies import ChunkWork
from megatron_autorecompute.planner.cost.unit_costs import Unit
from megatron_autorecompute.profile import OffloadGroup

NAMES = ("attn_norm", "core_attn", "attn_proj", "moe_act")


def groups(rng, most=3, size=20):
    """Of one layer, one after the other."""
    names = [name for name in NAMES if rng.random() < 0.5][:most]
    cuts = sorted(rng.random() for _ in names)
    turns = sorted(rng.random() for _ in range(2 * len(names)))
    found = []
    for number, name in enumerate(names):
        last = len(names) - 1 - number
        begin, end = turns[2 * last : 2 * last + 2]
        moved = rng.randint(1, size)
        found.append(OffloadGroup(name, rng.randint(0, moved), moved, cuts[number], begin, end))
    return tuple(found)


def random_works(rng, num_chunks):
    """Every chunk of a stage; every layer of a chunk copies its own groups, or none."""
    same = groups(rng)
    works = []
    for _ in range(num_chunks):
        units = []
        for layer in range(rng.randint(0, 4)):
            own = rng.choice([(), same, same, groups(rng)])
            forward, backward = rng.randint(0, 9_000), rng.randint(0, 18_000)
            units.append(
                Unit(f"layer {layer}", (layer,), 0, 0, 0, forward, backward, offload_groups=own)
            )
        works.append(ChunkWork.of(units, rng.randint(0, 99), rng.randint(0, 99)))
    return works
