"""Small random planning problems."""

import itertools
import random
from dataclasses import replace

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StageRecord,
    StaticBytes,
)

CHOICES = ("none", "full", "selective[core_attn]", "selective[mlp]")


def one_chunk_each(sizes, mtp_num_layers):
    """One chunk per stage with so many decoder layers; MTP depths are on the last."""
    rows = ["t" * size for size in sizes]
    rows[-1] += "m" * mtp_num_layers
    return Layout.from_rows(rows, len(rows))


def record(rng, choice, forward_ms=None, backward_ms=None):
    held, forward, backward = rng.randint(1, 12), rng.randint(0, 9), rng.randint(0, 12)
    return ChoiceRecord(
        choice,
        held_bytes=held,
        forward_transient_bytes=forward,
        backward_transient_bytes=backward,
        forward_ms=float(forward_ms or rng.randint(1, 4)),
        backward_ms=float(backward_ms or rng.randint(1, 6)),
        input_kept=choice == "full" or rng.random() < 0.7,
        kept_gradient_bytes=(None, 0, 1, 3)[(held + backward) % 4],
        also_static_bytes=held * forward % 3 if choice != "full" and held > 1 else 0,
    )


def records(rng, choices):
    """Of one kind: more recompute takes as long or longer, though a forward may be shorter."""
    forward_ms, backward_ms = rng.randint(2, 4), rng.randint(1, 6)
    more_ms = {"none": 0, "selective[core_attn]": rng.randint(0, 2)}
    more_ms["selective[mlp]"] = rng.randint(0, 3)
    more_ms["full"] = rng.randint(max(more_ms.values()), 6)
    shorter_ms = {choice: rng.random() < 0.3 for choice in choices}
    return tuple(
        record(
            rng,
            choice,
            forward_ms - shorter_ms[choice],
            backward_ms + shorter_ms[choice] + more_ms[choice],
        )
        for choice in choices
    )


def another(rng, recorded):
    """A record that contains no other's work but none's, and is contained in none's but full's."""
    times_ms = {r.choice: int(r.forward_ms + r.backward_ms) for r in recorded}
    least_ms = times_ms.get("none", 2)
    time_ms = rng.randint(least_ms, max(least_ms, times_ms.get("full", 12)))
    return record(rng, "selective[layernorm]", 1, time_ms - 1)


def drawn(seed):
    """A profile, layout, schedule and budget small enough to enumerate."""
    rng = random.Random(seed)
    pp, vp = rng.choice([(1, 1), (1, 1), (2, 1), (3, 1), (2, 2), (2, 2)])
    num_layers = rng.randint(1, 5) if pp == 1 else pp * vp * rng.randint(1, 2)
    mtp = rng.random() < 0.2
    owner = [rng.randrange(2) for _ in range(num_layers)]
    kinds = [
        LayerKind(
            f"kind{k}",
            tuple(i for i in range(num_layers) if owner[i] == k),
            records(rng, rng.sample(CHOICES, rng.randint(1, 4 - (pp == 1)))),
            static=StaticBytes(rng.randint(0, 3)),
        )
        for k in range(2)
    ]
    if mtp:
        depth = records(rng, ("none", "full"))
        kinds.append(LayerKind("mtp", (num_layers,), depth, static=StaticBytes(1)))
    profile = Profile(
        Model("random", num_layers, int(mtp)),
        Parallelism(micro_batch_size=2, seq_length=8),
        tuple(kinds),
        embedding=record(rng, "none"),
        head=record(rng, "none"),
        boundary_bytes=rng.randint(0, 2),
        embedding_static=StaticBytes(1),
        head_static=StaticBytes(0, 1, 2, 3),
        deallocate_pipeline_outputs=rng.random() < 0.7,
        overlap_p2p_comm=rng.random() < 0.5,
    )
    layout = Layout.from_flags(num_layers, pp, vp, mtp_num_layers=int(mtp))
    if mtp:
        of_depths = random.Random(f"depths {seed}")
        profile = replace(profile, final_norm=record(of_depths, "none"))
        if pp > 1 and of_depths.random() < 0.5:
            layout = _apart(num_layers, pp, vp)
    if rng.random() < 0.3:
        profile = replace(profile, stages=tuple(_stage_record(rng, s) for s in layout.stages))
    m = pp * rng.randint(1, 2) if vp > 1 else rng.randint(1, 4)
    return profile, layout, Schedule(pp, vp, m), rng.randint(8, 80)


def _apart(num_layers, pp, vp):
    """A layout whose last chunk has the depth and the loss, and no layer before them."""
    chunks = pp * vp
    first = num_layers - (chunks - 2)
    rows = ["E" + "t" * first, *["t"] * (chunks - 2), "mL"]
    return Layout.parse("|".join(rows), pp, vp)


def _stage_record(rng, chunks):
    layers = tuple(layer for chunk in chunks for layer in chunk.layers)
    static, peak = StaticBytes(rng.randint(0, 5), rng.randint(0, 5)), rng.randint(0, 40)
    residual = rng.randint(-3, 3)
    others = residual if residual > 0 else None
    return StageRecord(layers, static, peak, residual_bytes=residual, others_bytes=others)


def problem_of_many(num_layers=12):
    """One kind whose choices do not nest, so that labels abound."""
    costs = ((100, 9, 30, 10), (61, 20, 45, 13), (37, 31, 77, 17), (3, 40, 130, 40))
    names = ("none", "selective[mlp]", "selective[core_attn]", "full")
    choices = tuple(
        ChoiceRecord(name, h, f, b, float(ms), 2.0 * ms)
        for name, (h, f, b, ms) in zip(names, costs, strict=True)
    )
    base, _, _, _ = drawn(0)
    nothing = ChoiceRecord("none", 0, 0, 0, 0.0, 0.0)
    profile = replace(
        base,
        model=replace(base.model, num_layers=num_layers, mtp_num_layers=0),
        kinds=(LayerKind("k", tuple(range(num_layers)), choices, static=StaticBytes()),),
        embedding=nothing,
        head=nothing,
        final_norm=None,
        stages=(),
        boundary_bytes=0,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )
    return profile, Layout.from_flags(num_layers, 1), Schedule(1, 1, 4), 700


def scale(profile, size, time):
    def one(r):
        return replace(
            r,
            held_bytes=r.held_bytes * size,
            forward_transient_bytes=r.forward_transient_bytes * size,
            backward_transient_bytes=r.backward_transient_bytes * size,
            kept_gradient_bytes=r.kept_gradient_bytes and r.kept_gradient_bytes * size,
            also_static_bytes=r.also_static_bytes * size,
            forward_ms=r.forward_ms * time,
            backward_ms=r.backward_ms * time,
        )

    def static(s):
        return StaticBytes(
            s.parameter_bytes * size,
            s.gradient_bytes * size,
            s.optimizer_state_bytes * size,
            s.buffer_bytes * size,
        )

    kinds = tuple(
        replace(k, choices=tuple(map(one, k.choices)), static=static(k.static))
        for k in profile.kinds
    )
    stages = tuple(
        replace(
            s,
            static=static(s.static),
            optimizer_step_peak_bytes=s.optimizer_step_peak_bytes * size,
            residual_bytes=s.residual_bytes * size,
            others_bytes=s.others_bytes and s.others_bytes * size,
        )
        for s in profile.stages
    )
    return replace(
        profile,
        kinds=kinds,
        embedding=one(profile.embedding),
        head=one(profile.head),
        final_norm=profile.final_norm and one(profile.final_norm),
        boundary_bytes=profile.boundary_bytes * size,
        embedding_static=static(profile.embedding_static),
        head_static=static(profile.head_static),
        stages=stages,
    )


def problem_of_uneven_stages(seed):
    """As `problem`, with one chunk on each of several stages and any layers per stage."""
    rng = random.Random(seed)
    stages, num_layers, mtp = rng.choice([2, 3, 3, 4]), rng.randint(3, 6), rng.random() < 0.2
    owner = [rng.randrange(2) for _ in range(num_layers)]
    kinds = [
        LayerKind(
            f"kind{k}",
            tuple(i for i in range(num_layers) if owner[i] == k),
            records(rng, rng.sample(CHOICES, rng.randint(1, 4))),
            static=StaticBytes(rng.randint(0, 3)),
        )
        for k in range(2)
    ]
    if mtp:
        depth = records(rng, ("none", "full"))
        kinds.append(LayerKind("mtp", (num_layers,), depth, static=StaticBytes(1)))
    profile = Profile(
        Model("random", num_layers, int(mtp)),
        Parallelism(micro_batch_size=2, seq_length=8),
        tuple(kinds),
        embedding=record(rng, "none"),
        head=record(rng, "none"),
        boundary_bytes=rng.randint(0, 2),
        embedding_static=StaticBytes(1),
        head_static=StaticBytes(0, 1, 2, 3),
        deallocate_pipeline_outputs=rng.random() < 0.7,
        overlap_p2p_comm=rng.random() < 0.5,
        final_norm=record(rng, "none") if mtp else None,
    )
    cuts = sorted(rng.randint(0, num_layers) for _ in range(stages - 1))
    sizes = [stop - start for start, stop in itertools.pairwise((0, *cuts, num_layers))]
    layout = one_chunk_each(sizes, int(mtp))
    if rng.random() < 0.3:
        measured = (_stage_record(rng, chunks) for chunks in layout.stages)
        profile = replace(
            profile,
            stages=tuple(replace(s, residual_ms=rng.choice([0.0, 1.5, -2.0])) for s in measured),
        )
    schedule = Schedule(stages, 1, rng.choice([1, 2, 3, 5, 9, 20]))
    return profile, layout, schedule, rng.randint(15, 120)
