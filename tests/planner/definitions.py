"""What a step is and costs by the definitions of docs/files.md alone, and a brute force.

Profile, layout and schedule are read as data. Nothing here asks the planner, which is checked
against it: not the order of events, not what is alive beside the layers, not what a checkpoint
costs.
"""

import functools
import itertools
import math

from megatron_autorecompute.policy import LayerPolicy

COUNTED = {
    (2, 1, 1, False, True): ("00", "00"),
    (2, 1, 1, False, False): ("00", "00"),
    (2, 1, 2, False, True): ("0000", "0021"),
    (2, 1, 2, False, False): ("0000", "0021"),
    (2, 1, 3, False, True): ("000100", "002121"),
    (2, 1, 3, False, False): ("000200", "002121"),
    (2, 1, 4, False, True): ("00010100", "00212121"),
    (2, 1, 4, False, False): ("00020200", "00212121"),
    (3, 1, 1, False, True): ("00", "00", "00"),
    (3, 1, 1, False, False): ("00", "00", "00"),
    (3, 1, 2, False, True): ("0000", "0001", "0021"),
    (3, 1, 2, False, False): ("0000", "0001", "0021"),
    (3, 1, 3, False, True): ("000000", "000311", "002121"),
    (3, 1, 3, False, False): ("000000", "000411", "002121"),
    (3, 1, 4, False, True): ("00001000", "00031311", "00212121"),
    (3, 1, 4, False, False): ("00002000", "00041411", "00212121"),
    (2, 2, 2, True, True): ("00000122", "00012246"),
    (2, 2, 2, True, False): ("00000133", "00012246"),
    (2, 2, 2, False, True): ("00000122", "00001123"),
    (2, 2, 2, False, False): ("00000133", "00001123"),
    (2, 2, 4, True, True): ("0000112323110233", "0001235667343346"),
    (2, 2, 4, True, False): ("0000102222100244", "0001235566343346"),
    (2, 2, 4, False, True): ("0000112222110122", "0000113344111123"),
    (2, 2, 4, False, False): ("0000102121100133", "0000113243111123"),
}
"""Boundary tensors alive at each event, a digit each, `(p, v, m, overlapped, deallocated)[stage]`:
as counted while Megatron's own schedule ran (`tests/meta/boundary_tensors`), without outputs that
belong to a microbatch in flight. tests/meta counts them again."""


def order(schedule, stage):
    """(phase, chunk, microbatch) of everything a stage does, in order."""
    return _order(
        schedule.num_stages,
        schedule.num_chunks,
        schedule.num_microbatches,
        *_options(schedule),
        stage,
    )


def _options(schedule):
    group = schedule.microbatch_group_size or schedule.num_stages
    return group, schedule.overlap_moe_expert_parallel_comm


def _alone(p, v, forwards, group, overlap, stage):
    """How many forwards of a stage warm it up."""
    alone = p - 1 - stage if v == 1 else 2 * (p - 1 - stage) + (v - 1) * group
    return min(alone + overlap, forwards)


@functools.cache
def _order(p, v, m, group, overlap, stage):
    """Forwards alone to warm up, then a forward and a backward in turn, then backwards alone.

    Interleaved, a group of microbatches passes one chunk after the other; backwards pass them in
    the opposite order.
    """
    if v == 1:
        forwards = [(0, microbatch) for microbatch in range(m)]
    else:
        groups = [range(first, min(first + group, m)) for first in range(0, m, group)]
        forwards = [(chunk, microbatch) for g in groups for chunk in range(v) for microbatch in g]
    ahead = _alone(p, v, m * v, group, overlap, stage)
    events = [("forward", chunk, microbatch) for chunk, microbatch in forwards]
    backwards = [("backward", v - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    turns = zip(events[ahead:], backwards, strict=False)
    steady = list(itertools.chain.from_iterable(turns))
    return (*events[:ahead], *steady, *backwards[len(events) - ahead :])


def finish_by_plain_replay(schedule, forward, backward, ahead=None):
    """When each stage ends: whatever stage can run does, until all have run everything."""
    p, last = schedule.num_stages, schedule.num_stages * schedule.num_chunks - 1
    queues = [list(order(schedule, stage)) for stage in range(p)]
    ends = {(phase, stage): [] for phase in ("forward", "backward") for stage in range(p)}
    free, asks, done, moved = [0] * p, [None] * p, {}, True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                phase, chunk, microbatch = queue[0]
                position = chunk * p + stage
                neighbour = position - 1 if phase == "forward" else position + 1
                needs = (phase, neighbour, microbatch)
                if 0 <= neighbour <= last and needs not in done:
                    break
                asked = 0
                if asks[stage] is not None:
                    receiver, number = asks[stage]
                    if number >= len(ends[receiver]):
                        break
                    asked = ends[receiver][number]
                durations = forward if phase == "forward" else backward
                early = ahead[stage][chunk] if ahead is not None and phase == "backward" else 0
                start = max(free[stage] + early, asked, done.get(needs, -math.inf))
                free[stage] = start + durations[stage][chunk] - early
                done[phase, position, microbatch] = free[stage]
                asks[stage] = _asks(schedule, phase, position, len(ends[phase, stage]))
                ends[phase, stage].append(free[stage])
                queue.pop(0)
                moved = True
    assert not any(queues), "deadlock"
    return free


def _asks(schedule, phase, position, number):
    """After which event, `((phase, stage), number)`, the receiver of a stage's n-th forward or
    backward asks for it, if the stage waits until then: interleaved, in warm-up and cool-down. It
    asks after its own event before the one that needs it; at the ends of the pipeline as many
    events sooner as a microbatch takes from end to end. None: nothing is waited for."""
    p, v = schedule.num_stages, schedule.num_chunks
    stage, every, is_forward = position % p, schedule.num_microbatches * v, phase == "forward"
    alone = _alone(p, v, every, *_options(schedule), stage)
    waits = number < alone if is_forward else number >= every - alone
    if v == 1 or not waits or position == (p * v - 1 if is_forward else 0):
        return None
    receiver = stage + (1 if is_forward else -1)
    after = number - 1 if 0 <= receiver < p else number + p - 1
    return ((phase, receiver % p), after) if after >= 0 else None


def boundary_tensors(profile, schedule, stage):
    """Tensors of neighbouring stages that are alive at each event and belong to no layer."""
    p, v, m = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    if p == 1:
        return (0,) * (2 * m)
    overlapped = v > 1 and profile.overlap_p2p_comm
    digits = COUNTED[p, v, m, overlapped, profile.deallocate_pipeline_outputs][stage]
    return tuple(map(int, digits))


def _kind(profile, layer):
    return next(kind for kind in profile.kinds if layer in kind.layers)


def _sum(static):
    return (
        static.parameter_bytes
        + static.gradient_bytes
        + static.optimizer_state_bytes
        + static.buffer_bytes
    )


def chunk_policies(profile, layers):
    """Every assignment of choices and checkpoints to a chunk's layers."""
    if not layers:
        yield ()
        return
    for size in range(1, len(layers) + 1):
        head = layers[:size]
        if size == 1:
            firsts = [(LayerPolicy.parse(r.choice),) for r in _kind(profile, layers[0]).choices]
        elif all(_groupable(profile, layer) for layer in head):
            firsts = [(LayerPolicy("full", group=size),) * size]
        else:
            continue
        for first, rest in itertools.product(firsts, chunk_policies(profile, layers[size:])):
            yield first + rest


def _groupable(profile, layer):
    names = {r.choice for r in _kind(profile, layer).choices}
    return {"none", "full"} <= names and layer < profile.model.num_layers


def units(profile, chunk, policies, alone=False):
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
            else _one(profile, members, policy, received, chunk.head and alone)
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
    records = {r.choice: r for r in _kind(profile, layer).choices}
    return records.get(choice) or records[choice.removesuffix("+all")]


def _one(profile, members, policy, received, alone):
    found = _find(profile, members[0], str(policy))
    held, forward, backward, ms = _costs(found)
    if received and not found.input_kept:
        size = profile.boundary_bytes
        held, forward = held + size, max(0, forward - size)
    if alone:
        size = found.also_static_bytes
        held, backward = held - size, backward + size
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
        return _sum(r.static), r.optimizer_step_peak_bytes + (r.others_bytes or 0), r.residual_bytes
    static = 0
    for chunk in layout.stages[stage]:
        static += sum(_sum(_kind(profile, layer).static) for layer in chunk.layers)
        static += _sum(profile.embedding_static) * chunk.embedding
        static += _sum(profile.head_static) * chunk.head
    return static, 0, 0


def simulate(profile, layout, schedule, stage, chunk_choices):
    """Peak bytes and time of one microbatch, event by event."""
    static, optimizer, residual = stage_constants(profile, layout, stage)
    extra = boundary_tensors(profile, schedule, stage)
    chunks = layout.stages[stage]
    all_units = [
        units(profile, c, p, schedule.runs_head_alone)
        for c, p in zip(chunks, chunk_choices, strict=True)
    ]
    kept = [
        _kept_gradient(profile, chunk, choices)
        for chunk, choices in zip(chunks, chunk_choices, strict=True)
    ]
    peak, waiting = static + optimizer, 0
    for (phase, running, _), count in zip(order(schedule, stage), extra, strict=True):
        boundary = count * profile.boundary_bytes
        these = all_units[running]
        total = sum(u[0] for u in these)
        if phase == "forward":
            live = waiting
            for held, forward, _, _ in these:
                live += held
                peak = max(peak, static + residual + boundary + live + forward)
            waiting += total
        else:
            live = waiting
            waiting -= total
            for i, (held, _, backward, _) in reversed(list(enumerate(these))):
                last = i == len(these) - 1
                own = backward + (kept[running] if last else profile.boundary_bytes)
                own = backward if chunks[running].head else own
                peak = max(peak, static + residual + boundary + live + own)
                live -= held
    return peak, sum(u[3] for chunk_units in all_units for u in chunk_units)


def _kept_gradient(profile, chunk, choices):
    """What a chunk's last unit needs more because the schedule keeps its output's gradient."""
    norm = profile.final_norm is not None and chunk.layers[-1:] == (profile.model.num_layers - 1,)
    if not choices or norm:
        return profile.boundary_bytes
    found = _find(profile, chunk.layers[-1], str(choices[-1])) if choices[-1].group == 1 else None
    if found is None or (found.kept_gradient_bytes is None and found.choice == "full"):
        return 0
    more = found.kept_gradient_bytes
    return profile.boundary_bytes if more is None else more


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
