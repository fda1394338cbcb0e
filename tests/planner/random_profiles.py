"""Small random planning problems, and a brute force written from the definitions alone."""

import itertools
import random
from dataclasses import replace

from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.p2p_tensors import extra_tensors
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.policy import LayerPolicy
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


def record(rng, choice, forward_ms=None, backward_ms=None):
    return ChoiceRecord(
        choice,
        held_bytes=rng.randint(1, 12),
        forward_transient_bytes=rng.randint(0, 9),
        backward_transient_bytes=rng.randint(0, 12),
        forward_ms=float(forward_ms or rng.randint(1, 4)),
        backward_ms=float(backward_ms or rng.randint(1, 6)),
        input_kept=choice == "full" or rng.random() < 0.7,
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


def problem(seed):
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
    return StageRecord(
        layers,
        StaticBytes(rng.randint(0, 5), rng.randint(0, 5)),
        optimizer_step_peak_bytes=rng.randint(0, 40),
        residual_bytes=rng.randint(-3, 3),
    )


def chunk_policies(profile, layers):
    """Every assignment of choices and checkpoints to a chunk's layers."""
    if not layers:
        yield ()
        return
    for size in range(1, len(layers) + 1):
        head = layers[:size]
        if size == 1:
            firsts = [(LayerPolicy.parse(r.choice),) for r in profile.kind_of(layers[0]).choices]
        elif all(_groupable(profile, layer) for layer in head):
            firsts = [(LayerPolicy("full", group=size),) * size]
        else:
            continue
        for first, rest in itertools.product(firsts, chunk_policies(profile, layers[size:])):
            yield first + rest


def _groupable(profile, layer):
    names = {r.choice for r in profile.kind_of(layer).choices}
    return {"none", "full"} <= names and layer < profile.model.num_layers


def units(profile, chunk, policies):
    """(held, forward transient, backward transient, ms) of what runs as one, in order."""
    found = []
    if not chunk.head and not profile.deallocate_pipeline_outputs:
        found.append((profile.boundary_bytes, 0, 0, 0.0))
    if not (chunk.layers or chunk.embedding or chunk.head):
        found.append((profile.boundary_bytes, 0, 0, 0.0))
    if chunk.layers and chunk.layers[0] == profile.model.num_layers:  # a depth, of a copy
        found.append((profile.boundary_bytes, 0, 0, 0.0))
    if chunk.embedding:
        found.append(_costs(profile.embedding))
    position = 0
    while position < len(policies):
        policy = policies[position]
        members = chunk.layers[position : position + policy.group]
        depth = members[0] == profile.model.num_layers
        received = position == 0 and not chunk.embedding and not depth
        found.append(
            _checkpoint(profile, members)
            if policy.group > 1
            else _one(profile, members, policy, received)
        )
        position += policy.group
        if members[-1] == profile.model.num_layers - 1 and profile.final_norm is not None:
            found.append(_costs(profile.final_norm))
    if chunk.head:
        found.append(_costs(profile.head))
    return found


def _costs(r):
    return (
        r.held_bytes,
        r.forward_transient_bytes,
        r.backward_transient_bytes,
        r.forward_ms + r.backward_ms,
    )


def _find(profile, layer, choice):
    return next(r for r in profile.kind_of(layer).choices if r.choice == choice)


def _one(profile, members, policy, received):
    found = _find(profile, members[0], str(policy))
    held, forward, backward, ms = _costs(found)
    if received and not found.input_kept:
        size = profile.boundary_bytes
        return held + size, max(0, forward - size), backward, ms
    return held, forward, backward, ms


def _checkpoint(profile, members):
    """Walk through the checkpoint's forward and backward, noting the highest point of each."""
    none = [_find(profile, layer, "none") for layer in members]
    full = [_find(profile, layer, "full") for layer in members]
    held = full[0].held_bytes
    forward = 0
    for i, r in enumerate(full):
        own_input = r.held_bytes if i else 0
        forward = max(forward, own_input + r.forward_transient_bytes)
    live, highest, extra = 0, [], []
    for r in none:  # forward again, under grad
        live += r.held_bytes
        highest.append(live + r.forward_transient_bytes)
    for r in reversed(none):  # backward, last member first
        highest.append(live + r.backward_transient_bytes)
        live -= r.held_bytes
    kept = []
    for r, f in zip(none, full, strict=True):
        alone = r.held_bytes + max(r.forward_transient_bytes, r.backward_transient_bytes)
        kept.append(f.held_bytes + f.backward_transient_bytes - alone)
    # What a checkpoint keeps besides is known per layer; the walk below adds the largest of the
    # members up to the one that runs.
    live = peak = 0
    for i, r in enumerate(none):
        live += r.held_bytes
        extra.append(max(kept[: i + 1]))
        peak = max(peak, live + max(r.forward_transient_bytes, r.backward_transient_bytes))
    backward = max(0, peak + max(extra) - held)
    assert peak == max(highest)
    return held, forward, backward, sum(r.forward_ms + r.backward_ms for r in full)


def stage_constants(profile, layout, stage):
    """(static, optimizer peak, residual)."""
    if profile.stages:
        r = profile.stages[stage]
        return r.static.total_bytes, r.optimizer_step_peak_bytes, r.residual_bytes
    static = 0
    for chunk in layout.stages[stage]:
        static += sum(profile.kind_of(layer).static.total_bytes for layer in chunk.layers)
        static += profile.embedding_static.total_bytes * chunk.embedding
        static += profile.head_static.total_bytes * chunk.head
    return static, 0, 0


def simulate(profile, layout, schedule, stage, chunk_choices):
    """Peak bytes and time of one microbatch, event by event."""
    static, optimizer, residual = stage_constants(profile, layout, stage)
    extra = extra_tensors(
        schedule,
        stage,
        overlap_p2p=profile.overlap_p2p_comm,
        deallocated=profile.deallocate_pipeline_outputs,
    )
    chunks = layout.stages[stage]
    all_units = [units(profile, c, p) for c, p in zip(chunks, chunk_choices, strict=True)]
    ends_in_checkpoint = [
        bool(p)
        and p[-1].granularity == "full"
        and (profile.final_norm is None or chunk.layers[-1] != profile.model.num_layers - 1)
        for chunk, p in zip(chunks, chunk_choices, strict=True)
    ]
    peak, waiting = static + optimizer, 0
    for event, count in zip(schedule.events(stage), extra, strict=True):
        boundary = count * profile.boundary_bytes
        these = all_units[event.chunk]
        total = sum(u[0] for u in these)
        if event.direction == "forward":
            live = waiting
            for held, forward, _, _ in these:
                live += held
                peak = max(peak, static + residual + boundary + live + forward)
            waiting += total
        else:
            live = waiting
            waiting -= total
            for i, (held, _, backward, _) in reversed(list(enumerate(these))):
                last = i == len(these) - 1 and ends_in_checkpoint[event.chunk]
                own = backward + (0 if last or chunks[event.chunk].head else profile.boundary_bytes)
                peak = max(peak, static + residual + boundary + live + own)
                live -= held
    return peak, sum(u[3] for chunk_units in all_units for u in chunk_units)


def runs_of(policies):
    return sum(1 for _ in itertools.groupby(policies))


def brute_force(profile, layout, schedule, stage, budget):
    """Best (ms, peak bytes, runs) over all choices of a stage; None when none fits."""
    options = [list(chunk_policies(profile, c.layers)) for c in layout.stages[stage]]
    best = None
    for combination in itertools.product(*options):
        peak, time_ms = simulate(profile, layout, schedule, stage, combination)
        key = (time_ms, peak, sum(map(runs_of, combination)))
        if peak <= budget and (best is None or key < best):
            best = key
    return best


def problem_of_many(num_layers=12):
    """One kind whose choices do not nest, so that labels abound."""
    costs = ((100, 9, 30, 10), (61, 20, 45, 13), (37, 31, 77, 17), (3, 40, 130, 40))
    names = ("none", "selective[mlp]", "selective[core_attn]", "full")
    choices = tuple(
        ChoiceRecord(name, h, f, b, float(ms), 2.0 * ms)
        for name, (h, f, b, ms) in zip(names, costs, strict=True)
    )
    base, _, _, _ = problem(0)
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
