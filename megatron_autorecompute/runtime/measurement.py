"""Measures what each choice costs on each kind of layer, in ordinary training steps.

Recompute does not change what a step computes, so measuring steps train as usual. A `Measurement`
varies the choices from step to step through `apply`, so that what is measured is what runs. It
turns the figures of all ranks into a `Profile`.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.errors import ApplyError, PipelineError
from megatron_autorecompute.planner.cost.p2p_tensors import extra_owners
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerBytes,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
    in_order,
    with_times_of,
)
from megatron_autorecompute.runtime.apply import AppliedPolicy
from megatron_autorecompute.runtime.lengths_seen import Points
from megatron_autorecompute.runtime.model_shard import Kind, ModelShard
from megatron_autorecompute.runtime.offload import Groups, most, with_groups
from megatron_autorecompute.runtime.probe import (
    DEVICE_CLOCK,
    Clock,
    Host,
    Mark,
    Memory,
    Pass,
    Place,
    Probe,
    Span,
    host_beside,
    host_ms_between,
    spans,
)
from megatron_autorecompute.runtime.samples import (
    SAMPLES,
    TURNS,
    Evened,
    Reading,
    Samples,
    SamplesByKey,
    evened,
    of_parts,
    percentiles,
)

SEED = 1
"""The seed of the places at which choices are shown."""
FIRST_AHEAD_MS, AHEAD = 30.0, 2.0
"""How long the device waits at the beginning of a timed pass: ms while the host's time for a pass
is not known, then a multiple of that time."""

NEAR_PEAK = 0.8
"""Lines for what a call holds beside layers use moments that need this share of its peak. On one
stage they use all moments, because the longest microbatch may come when all of the call's batch has
been touched."""


class Measurement:
    """Varies choices over the layers from step to step and collects what they cost.

        for _ in measurement.policies():
            with measurement.watch(memory):
                training_step()
        profile = measurement.profile(...)

    Every rank does the same; `profile` combines the bytes and times of all ranks.

    Args:
        shard: this rank's model.
        applied: the policy in force on it; `policies` switches it.
        clock: source of times.
        points: keeps figures with the lengths they were seen at, if microbatches differ.
        routed: what experts got in the step that ends, as `SeenTokens.routed`.
        left: what left under choices that offload, by layer, on this rank.
        host: the clock of the host, read beside the device's; None where there is no device.
        timed: which choices are timed. A choice that offloads takes the times of the same
            choice without offload. Any other untimed choice takes the sum of what its modules add
            (`samples.of_parts`).
    """

    def __init__(
        self,
        shard: ModelShard,
        applied: AppliedPolicy,
        clock: Clock = DEVICE_CLOCK,
        points: Points | None = None,
        routed: Callable[[], Sequence[Mapping[int, int]]] = tuple,
        left: Callable[[], Groups] = dict,
        host: Host | None = None,
        timed: Callable[[LayerPolicy], bool] = lambda choice: not choice.offload,
    ) -> None:
        self.shard, self._left, self._timed = shard, left, timed
        self.applied = applied
        self._clock, self._host = clock, host or host_beside()
        self._ahead_ms = {"forward": FIRST_AHEAD_MS, "backward": FIRST_AHEAD_MS}
        self._turn = self._step = 0
        self._took_turns, self._rng = False, random.Random(SEED)
        self.points, self._routed = points, routed
        self.boundary_bytes = 0
        self.static_bytes = 0
        self.peak_bytes = 0
        self.optimizer_step_peak_bytes = 0
        self.overhead = ScheduleOverhead(0, 0)
        self.samples: SamplesByKey = defaultdict(Samples)
        """What this rank saw so far; `profile` puts all ranks' together."""
        depths = (site.indices for site in model_layers.mtp_sites(shard.chunks))
        self._depths = set(itertools.chain.from_iterable(depths))
        self._tied = {n for n, one in enumerate(shard.chunks) if model_layers.ties_weights(one)}
        self._tower_layers = model_layers.tower_layers(shard.chunks)

    def policies(
        self,
        *,
        room: Sequence[int] | None = None,
        most_steps: int | None = None,
        wanted: Callable[[LayerPolicy], bool] = lambda _: True,
    ) -> Iterator[None]:
        """Switch through policies that together show every choice of every kind.

        For each choice to be measured, one layer of every kind has it; all other layers have their
        leanest choice, so that a step needs hardly more than the leanest policy. A model with more
        layers of each kind than choices needs one step. Choices that offload have steps of their
        own, so that nothing waits for copies in the others.

        Args:
            room: for every stage, how many layers may leave the leanest choice in one step. By
                default all; if there is room for none, one on the last stage.
            most_steps: stop after so many steps; choices that are left stay unmeasured.
            wanted: the choices that are shown.
        """
        for policy in itertools.islice(self._in_turn(room, wanted), most_steps):
            self.applied.switch(policy)
            yield

    def turns(
        self,
        *,
        microbatches: int,
        room: Sequence[int] | None = None,
        most_steps: int | None = None,
        samples: int = SAMPLES,
    ) -> Iterator[bool]:
        """Switch through policies whose steps are timed: TURNS times those of `policies`, with the
        choices on layers at random every time, and so many steps of each that a choice has its
        samples.

        Yields, before each step, whether it is timed. With a device the first one after a switch is
        not, because what the host did in the step before hides launches of this one; but where
        there are too few steps to show all choices otherwise, it is.

        Args:
            microbatches: the microbatches of a step on one rank, each of which is a sample.
            room: as in `policies`.
            most_steps: stop after so many steps.
            samples: the number of samples of every choice on a rank, at least.
        """
        left = math.inf if most_steps is None else most_steps
        settling = int(self._host is not None)
        wanted = settling - (-samples // (TURNS * microbatches))
        for turn in range(TURNS):
            policies = list(self._in_turn(room, self._timed, turn))
            later = len(policies) * (TURNS - 1 - turn)
            for here in range(len(policies), 0, -1):
                least = 1 + settling if turn else max(1, min(1 + settling, left / here))
                each = int(max(least, min(wanted, left / (here + later))))
                if each > left:
                    return
                self._turn, self._took_turns, left = turn, True, left - each
                self.applied.switch(policies[-here])
                yield from (number >= settling or each == 1 for number in range(each))

    def steps_to_show(self, room: Sequence[int]) -> int:
        """How many steps it takes to time every choice once."""
        return sum(1 for _ in self._in_turn(room, self._timed))

    def richest(self, room: Sequence[int]) -> RecomputePolicy:
        """No recompute on as many layers of each stage as there is room for."""
        left, layers = list(room), list(self.shard.leanest().layers)
        for kind in self.shard.kinds:
            for index in self._with_room(kind.layers, left, at_random=False):
                layers[index] = NONE if NONE in kind.choices else layers[index]
        return RecomputePolicy(tuple(layers))

    def _in_turn(
        self,
        room: Sequence[int] | None,
        wanted: Callable[[LayerPolicy], bool],
        turn: int | None = None,
    ) -> Iterator[RecomputePolicy]:
        """Policies that together show every wanted choice once, on the first layers with room.

        In a turn, on layers at random; after the first turn in another order every time, so that
        choices of which one step shows few are not always shown together."""
        for moved in (False, True):
            due = [
                [c for c in kind.choices if wanted(c) and bool(c.offload) is moved]
                for kind in self.shard.kinds
            ]
            for choices in due if turn else []:
                self._rng.shuffle(choices)
            while any(due):
                left, layers = list(room or ()), list(self.shard.leanest().layers)
                for kind, choices in zip(self.shard.kinds, due, strict=True):
                    found = self._with_room(kind.layers, left, at_random=turn is not None)
                    for index in found[: len(choices)]:
                        layers[index] = choices.pop(0)
                yield RecomputePolicy(tuple(layers))

    def _with_room(self, layers: Sequence[int], left: list[int], *, at_random: bool) -> list[int]:
        """The layers of a kind that may leave the leanest choice; reduces `left` by them."""
        turned = self._rng.sample(layers, len(layers)) if at_random else list(layers)
        if not left:
            return turned
        if not any(left):
            left[-1] = 1
        chosen = []
        # Later stages hold fewer microbatches at once, so a layer there needs less room.
        for index in sorted(turned, key=lambda index: -self.shard.stage_of[index]):
            if left[self.shard.stage_of[index]] > 0:
                left[self.shard.stage_of[index]] -= 1
                chosen.append(index)
        return chosen

    @contextmanager
    def watch(self, memory: Memory | None, *, times: bool = True) -> Iterator[None]:
        """Measure the training step inside, under the policy in force.

        Args:
            memory: source of bytes; None in a step that measures times only.
            times: whether times are measured. Reading bytes makes a step longer, so what is timed
                in the same step must be what a clock counts, such as operations.

        Raises ApplyError: on every rank, if on any of them the step was not one forward and one
        backward of every microbatch, in the order of Megatron's schedule.
        """
        if memory is not None:
            self.static_bytes = memory.current_bytes
        host = self._host if memory is None else None
        ahead_ms = self._ahead_ms if times else {}
        with Probe(self.shard.chunks, memory, self._clock, host, ahead_ms) as probe:
            yield
        self._step += times
        if host is not None and not times:
            self._note_launches(probe.passes)
        self._check_measurable(probe.passes)
        events = self._schedule(probe.passes).events(self.shard.stage)
        numbers = [event.microbatch for event in events]
        self._begin_call(probe.passes, numbers)
        if memory is not None:
            # Gradients of the step before can still be alive when this one begins.
            self.static_bytes = min(self.static_bytes, probe.passes[0].marks[0].current_bytes)
            self.boundary_bytes = max(self.boundary_bytes, probe.boundary_bytes)
            self.peak_bytes = max(memory.peak_bytes, probe.peak_bytes)
            self.optimizer_step_peak_bytes = memory.peak_bytes - self.static_bytes
            self._note_overhead(probe.passes, numbers)
        forwards = {id(one.backward): one for one in probe.passes}
        for one, number in zip(probe.passes, numbers, strict=True):
            bases = self._bases(one, forwards.get(id(one), one))
            for span in self._spans(one):
                self._note(one, number, span, bases, memory is not None, times)

    def _note_launches(self, passes: Sequence[Pass]) -> None:
        """How long the device must wait for the host to launch all of a pass."""
        for phase in self._ahead_ms:
            took_ms = [one.host_ms for one in passes if one.phase == phase]
            self._ahead_ms[phase] = AHEAD * max(took_ms, default=0.0)

    def _begin_call(self, passes: Sequence[Pass], numbers: Sequence[int]) -> None:
        if self.points is None:
            return
        found = {n: one for one, n in zip(passes, numbers, strict=True) if one.tokens}
        config = self.shard.config
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        passes_in_order = (found[number] for number in sorted(found))
        lengths = [(split * one.tokens, _squares(one, split)) for one in passes_in_order]
        self.points.calls.append(lengths)
        self.points.routed.append(list(self._routed()))
        for number, one in found.items():
            where = len(self.points.calls) - 1, number, -1
            self.points.boundaries.append((where, self._boundary_bytes(one)))

    def _boundary_bytes(self, one: Pass) -> int:
        """Size of the hidden states of a pass, as stages send them."""
        layers = range(self._tower_layers, self.shard.num_layers)
        found = [mark.input_bytes for mark in one.marks if mark.place in layers]
        ends = [mark.input_bytes for mark in one.marks if mark.place == "head"]
        return max(found or ends, default=self.boundary_bytes)

    def _spans(self, one: Pass) -> Iterator[Span]:
        """The spans of a pass. In a loop of its own kind the loss runs outside the model: it is the
        head's, with all that is done until the next pass begins."""
        for span in spans(one, self._clock):
            ends = span.place == "head" and one.phase == "forward"
            if ends and self.points is not None and one.after is not None:
                yield self._with_loss(one, span, one.after)
            else:
                yield span

    def _with_loss(self, one: Pass, head: Span, after: Mark) -> Span:
        """The head's span until the next pass begins; what the loss keeps is the head's, if that
        pass is not the backward that frees it."""
        peak_bytes, end = max(head.peak_bytes, after.peak_bytes), one.marks[-1]
        follows = one.backward is not None and one.backward.marks[0] is after
        kept_bytes = 0 if follows else max(0, after.current_bytes - end.current_bytes)
        more_ms = self._clock.ms_between(end.at, after.at) if follows else 0.0
        more_host_ms = host_ms_between(end, after) if follows else 0.0
        return replace(
            head,
            peak_bytes=peak_bytes,
            end_bytes=head.end_bytes + kept_bytes,
            ms=head.ms + more_ms,
            host_ms=head.host_ms and head.host_ms + (more_host_ms or 0.0),
        )

    def _check_measurable(self, passes: Sequence[Pass]) -> None:
        reasons = list(filter(None, self.shard.all_gather(self._not_measurable(passes))))
        if reasons:
            raise ApplyError(
                f"auto cannot measure layers in this training step: {reasons[0]}. Give a policy in "
                "place of auto."
            )

    def _not_measurable(self, passes: Sequence[Pass]) -> str | None:
        """Why this rank's passes are not those of Megatron's schedule; None if they are."""
        if not passes:
            around = "; schedule() and step() belong around training calls alone"
            return f"no forward of the model had a backward{around * (self.points is not None)}"
        for one in passes:
            if one.phase == "forward" and not one.output_has_gradient:
                return "gradients reach the layers by another way than what the model returns"
            layers = [mark.place for mark in one.marks if isinstance(mark.place, int)]
            if len(set(layers)) < len(layers):
                return f"layer {statistics.mode(layers)} runs more than once in one {one.phase}"
        try:
            events = self._schedule(passes).events(self.shard.stage)
        except PipelineError:  # no schedule has that many passes
            events = ()
        if [(one.phase, one.chunk) for one in passes] != [(e.direction, e.chunk) for e in events]:
            return (
                "a microbatch goes through the model with gradients more than once, or in another "
                "order than Megatron's schedule has"
            )
        return None

    def unseen(self) -> list[tuple[LayerPolicy, Kind]]:
        """Choices that no rank has measured yet, each with its kind."""
        seen = self._seen_everywhere()
        return [
            (choice, kind)
            for kind in self.shard.kinds
            for choice in kind.choices
            if not seen[kind.signature, choice].complete(self._timed(choice))
        ]

    def most_held_bytes(self) -> int:
        """The most bytes that any layer held, on any rank."""
        seen = self._seen_everywhere().values()
        most = max((held for s in seen for held in s.held_bytes), default=0)
        return most + self.boundary_bytes

    def _seen_everywhere(self) -> SamplesByKey:
        return _put_together(self.shard.all_gather(dict(self.samples)))

    def _choice(self, place: Place) -> LayerPolicy:
        return self.applied.policy.layers[place] if isinstance(place, int) else NONE

    def _note(
        self,
        one: Pass,
        number: int,
        span: Span,
        bases: dict[Place, int],
        with_bytes: bool,
        with_times: bool,
    ) -> None:
        place = span.place
        if not self.shard.has(one.chunk, place):
            return
        signature = self.shard.signatures[place] if isinstance(place, int) else place
        seen = self.samples[signature, self._choice(place)]
        input_bytes = span.input_bytes
        received = place == self._received_by(one)
        found: dict[str, int | float] = {}
        if with_bytes and one.phase == "forward":
            base = bases.get(place, span.begin_bytes - input_bytes)
            found = {"held_bytes": _held_bytes(span), "forward_level_bytes": span.peak_bytes - base}
            if not received:
                found["input_bytes"] = input_bytes * (place in one.kept)
        elif with_bytes:
            # The input's gradient is alive now; the input is freed, unless another stage sent it.
            base = span.end_bytes - input_bytes * (2 if received else 1)
            base -= _context_gradient_bytes(one, place)
            base = bases.get(place, base)
            if place == self._sends_from(one):  # the schedule keeps the gradient, as what is around
                found = {"kept_level_bytes": span.peak_bytes - base + span.output_bytes}
            else:
                found = {"backward_level_bytes": span.peak_bytes - base}
                found["kept_level_bytes"] = span.kept_peak_bytes - base
        for figure, value in found.items():
            getattr(seen, figure).append(value)
        if with_times:
            readings = seen.forward if one.phase == "forward" else seen.backward
            readings.append(Reading(self._turn, self._step, span.ms, span.host_ms, span.is_ahead))
            found["forward_ms" if one.phase == "forward" else "backward_ms"] = span.ms
        if self.points is not None:
            key = signature, self._choice(place)
            where = len(self.points.calls) - 1, number, place if isinstance(place, int) else -1
            for figure, value in found.items():
                self.points.figures[key, figure].append((where, value))

    def _received_by(self, one: Pass) -> Place | None:
        """The layer whose input another stage sent; None if the first layer gets a copy of it."""
        first = one.first_place
        if self.shard.has(one.chunk, "embedding") or first in self._depths:
            return None
        return first

    def _sends_from(self, one: Pass) -> Place | None:
        """The layer whose output another stage got, in a backward; None if the head is here."""
        if self.shard.has(one.chunk, "head"):
            return None
        return next((m.place for m in one.marks if self.shard.has(one.chunk, m.place)), None)

    def _bases(self, one: Pass, forward: Pass) -> dict[Place, int]:
        """Base bytes (alive, and not of the place) at each place of a pass; only with MTP depths,
        and where embedding and head share their weights.

        They are counted up from what earlier places hold. Otherwise the base is read when the place
        ends. A depth leaves gradients behind that belong to no place: those of the hidden states of
        all losses. So does a head whose weights are the embedding's: the gradient waits for the
        embedding's part of it. Of a layer's base only this is taken off: gradients of its own
        weights may stay.
        """
        places = {mark.place for mark in forward.marks}
        if not places & self._depths and forward.chunk not in self._tied:
            return {}
        own = {
            span.place: _held_bytes(span) + forward.kept.get(span.place, 0)
            for span in self._existing(forward)
        }
        base = one.marks[0].current_bytes
        if one.phase == "backward":
            base -= sum(own.values())
        elif self._received_by(one) is not None:
            base -= one.marks[1].input_bytes
        before = itertools.accumulate(own.values(), initial=base)
        counted = dict(zip(own, before, strict=False))
        if one.phase == "forward" or places & self._depths:
            return counted
        found = {span.place: span for span in self._spans(one)}
        head = found["head"]
        waiting = head.end_bytes - head.input_bytes - counted["head"]
        read = {
            place: span.end_bytes - span.input_bytes - _context_gradient_bytes(one, place) - waiting
            for place, span in found.items()
            if place not in ("head", "embedding")
        }
        return {"head": counted["head"], **read}

    def _note_overhead(self, passes: Sequence[Pass], numbers: Sequence[int]) -> None:
        """Note the bytes alive when a pass starts, besides those of layers and boundary tensors."""
        most, near = {"forward": 0, "backward": 0}, {"forward": 0, "backward": 0}
        high = [max(mark.peak_bytes for mark in one.marks[1:]) for one in passes]
        sizes = {n: self._boundary_bytes(one) for one, n in zip(passes, numbers, strict=True)}
        in_flight, config = defaultdict[int, deque[int]](deque), self.shard.config
        share = NEAR_PEAK if config.pipeline_model_parallel_size > 1 else 0.0
        owners_of = extra_owners(
            self._schedule(passes),
            self.shard.stage,
            overlap_p2p=config.overlap_p2p_comm,
            deallocated=config.deallocate_pipeline_outputs,
        )
        for one, number, owners, peak_bytes in zip(passes, numbers, owners_of, high, strict=True):
            held = sum(map(sum, in_flight.values()))
            above = one.marks[0].current_bytes - self.static_bytes - held
            # The received input belongs to the first layer, the received gradient to the last.
            outside: Place = "embedding" if one.phase == "forward" else "head"
            received = 0 if self.shard.has(one.chunk, outside) else sizes[number]
            rest = above - received - sum(sizes[owner] for owner in owners)
            most[one.phase] = max(most[one.phase], rest)
            if peak_bytes >= share * max(high):
                near[one.phase] = max(near[one.phase], rest)
            if one.phase == "forward":
                in_flight[one.chunk].append(self._held_of(one))
            else:
                in_flight[one.chunk].popleft()
        self.overhead = self.overhead.or_more(ScheduleOverhead(most["forward"], most["backward"]))
        if self.points is not None:
            for direction, value in near.items():
                call = len(self.points.calls) - 1
                self.points.overheads[direction].append((call, value))

    def _schedule(self, passes: Sequence[Pass]) -> Schedule:
        """Megatron's schedule for this number of passes."""
        return self.shard.schedule(len(passes) // (2 * len(self.shard.chunks)))

    def _held_of(self, one: Pass) -> int:
        """Bytes that one microbatch in flight holds of a chunk, with the output if it is kept."""
        kept = not (
            self.shard.has(one.chunk, "head") or self.shard.config.deallocate_pipeline_outputs
        )
        held = sum(_held_bytes(span) for span in self._existing(one))
        inputs = sum(size for place, size in one.kept.items() if self.shard.has(one.chunk, place))
        first = self.shard.has(one.chunk, "embedding") or self._received_by(one) is not None
        return held + inputs + (kept + (not first)) * self._boundary_bytes(one)

    def _existing(self, one: Pass) -> Iterator[Span]:
        return (s for s in self._spans(one) if self.shard.has(one.chunk, s.place))

    def profile(
        self,
        model: Model,
        parallelism: Parallelism,
        static: StaticBytes,
        *,
        fingerprint: dict[str, str] | None = None,
        assumptions: tuple[str, ...] = (),
    ) -> Profile:
        """Combine all ranks' figures: the most bytes, lower quartiles of times. Equal on all ranks.
        `static` are this rank's bytes besides activations."""
        mine = evened(self.samples) if self._took_turns else Evened(dict(self.samples))
        even = self.shard.all_gather(mine)
        by_rank = [one.seen for one in even]
        seen = _put_together(by_rank)
        groups = most(*self.shard.all_gather(self._left()))
        stages: dict[int, StageRecord] = {}
        own = StageRecord(
            layers=tuple(sorted(self.shard.signatures)),
            static=static,
            optimizer_step_peak_bytes=max(0, self.optimizer_step_peak_bytes),
            overhead=self.overhead,
        )
        for stage, record in self.shard.all_gather((self.shard.stage, own)):
            stages[stage] = _larger(stages.get(stage, record), record)
        config = self.shard.config
        embedding = seen["embedding", NONE].record(NONE, 0)
        norm = seen["final_norm", NONE]
        if model.encoder_layers:
            between = seen["between", NONE].record(NONE, self.boundary_bytes)
            embedding = _together(embedding, between)
        return Profile(
            model=model,
            parallelism=parallelism,
            kinds=tuple(
                _layer_kind(kind, seen, by_rank, self.boundary_bytes, groups, self._timed)
                for kind in self.shard.kinds
            ),
            embedding=embedding,
            head=seen["head", NONE].record(NONE, self.boundary_bytes),
            final_norm=norm.record(NONE, self.boundary_bytes) if norm.complete() else None,
            boundary_bytes=self.boundary_bytes,
            stages=tuple(stages[rank] for rank in sorted(stages)),
            deallocate_pipeline_outputs=bool(config.deallocate_pipeline_outputs),
            overlap_p2p_comm=bool(config.overlap_p2p_comm),
            times_error=max(one.device_error for one in even),
            host_times_error=max(one.host_error for one in even),
            fingerprint=fingerprint or {},
            assumptions=assumptions,
        )


def _squares(one: Pass, split: int) -> int:
    """`Microbatch.squares` of a forward, as this rank has its samples."""
    tokens = split * one.tokens
    if one.packed is None:
        return tokens * tokens // one.samples
    lengths = one.packed.diff().tolist()  # of whole samples, over which context parallelism splits
    return round(sum(length * length for length in lengths) * (tokens / sum(lengths)) ** 2)


def _held_bytes(span: Span) -> int:
    """Bytes that a place keeps, without its input and its output (which is the next place's)."""
    output_bytes = 0 if span.place == "head" else span.output_bytes
    grown = span.end_bytes - span.begin_bytes
    return max(0, grown + span.let_go_bytes - output_bytes)


def _context_gradient_bytes(one: Pass, place: Place) -> int:
    """Bytes of the gradient of the encoder's output, in the backward of a decoder layer.

    Every decoder layer adds to this gradient, which is alive from the last decoder layer's backward
    on. It belongs to no layer, so it is not part of any layer's figures.
    """
    found = {mark.place: (at, mark.input_bytes) for at, mark in enumerate(one.marks)}
    if "between" not in found or not isinstance(place, int):
        return 0
    at, context_bytes = found["between"]
    return context_bytes if found[place][0] < at else 0


def _together(embedding: ChoiceRecord, between: ChoiceRecord) -> ChoiceRecord:
    """Embedding, and the place between encoder and decoder, as one pseudo-layer.

    Both count as before the first layer, so the second is counted too early, during the encoder.
    """
    added = ("held_bytes", "forward_ms", "backward_ms", "spread_ms", "turn_spread_ms")
    largest = ("forward_transient_bytes", "backward_transient_bytes")
    figures = {name: getattr(embedding, name) + getattr(between, name) for name in added}
    figures |= {name: max(getattr(embedding, name), getattr(between, name)) for name in largest}
    host = embedding.host and between.host and embedding.host.plus(between.host)
    return replace(embedding, **figures, host=host)


def _put_together(by_rank: Sequence[SamplesByKey]) -> SamplesByKey:
    everything: SamplesByKey = defaultdict(Samples)
    for seen in by_rank:
        for key, found in seen.items():
            everything[key].add(found)
    return everything


def _layer_kind(
    kind: Kind,
    seen: SamplesByKey,
    by_rank: Sequence[SamplesByKey],
    boundary_bytes: int,
    groups: Groups,
    timed: Callable[[LayerPolicy], bool],
) -> LayerKind:
    records: dict[LayerPolicy, ChoiceRecord] = {}
    moves_nothing: dict[LayerPolicy, LayerPolicy] = {}
    for choice in kind.choices:
        found, other = seen[kind.signature, choice], None
        if not timed(choice):
            other = records.get(choice.recompute) if choice.offload else of_parts(choice, records)
        if not found.complete(timed(choice)) or (other is None and not timed(choice)):
            continue
        record = found.record(choice, boundary_bytes)
        record = record if other is None else with_times_of(record, other)
        if choice.offload:  # its backwards waited for copies, which the planner replays
            record = with_groups(record, kind.layers, groups)
            if not record.offload_groups:
                moves_nothing[choice] = choice.recompute
                continue
        if kind.has_experts:
            own = (one.get((kind.signature, choice)) for one in by_rank)
            ranks = [samples for samples in own if samples and samples.held_bytes]
            record = replace(record, percentiles=percentiles(record, ranks))
        records[choice] = record
    equal = _inert(records)
    equal |= {larger: equal.get(smaller, smaller) for larger, smaller in moves_nothing.items()}
    inert = {str(larger): str(smaller) for larger, smaller in equal.items()}
    given = list(records.values())
    ordered = in_order(given, [record.runs for record in given])
    planned = tuple(record for record in ordered if record.choice not in inert)
    return LayerKind(kind.name, kind.layers, planned, inert)


def _inert(records: dict[LayerPolicy, ChoiceRecord]) -> dict[LayerPolicy, LayerPolicy]:
    """Sets of modules with the same bytes as a smaller set, and that smaller set."""
    inert: dict[LayerPolicy, LayerPolicy] = {}
    for larger, smaller in itertools.product(records, repeat=2):
        if (
            not (larger.offload or smaller.offload)
            and larger.granularity == "selective"
            and smaller.granularity in ("none", "selective")
            and set(smaller.modules) < set(larger.modules)
            and (larger.rerun_all == smaller.rerun_all or not smaller.has_dead_work)
            and not (larger.keep or smaller.keep)
            and larger not in inert
            and LayerBytes.of(records[larger]) == LayerBytes.of(records[smaller])
        ):
            inert[larger] = inert.get(smaller, smaller)
    return inert


def _larger(one: StageRecord, other: StageRecord) -> StageRecord:
    """The most bytes of two ranks of a stage."""
    assert one.overhead is not None
    assert other.overhead is not None
    peak = max(one.optimizer_step_peak_bytes, other.optimizer_step_peak_bytes)
    return replace(
        max(one, other, key=lambda record: record.static.total_bytes),
        optimizer_step_peak_bytes=peak,
        overhead=one.overhead.or_more(other.overhead),
    )
