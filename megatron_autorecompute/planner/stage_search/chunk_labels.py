"""Labels of one chunk, from its last layer to its first, without those that cannot win."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_autorecompute.planner.arrays import Bools, Ints
from megatron_autorecompute.planner.stage_search.labels import (
    APART,
    BACKWARD,
    COLUMNS,
    FIRST,
    FORWARD,
    GROUP_IDS,
    HELD,
    PARENT,
    POSITION,
    RUNS,
    TIME,
    Labels,
    front,
    prepend,
    spread,
)
from megatron_autorecompute.planner.stage_search.limits import NO_LIMIT, Limits
from megatron_autorecompute.planner.unit_costs import Unit
from megatron_autorecompute.policy import LayerPolicy


class ChunkLabels:
    """Makes the labels of one chunk.

    Args:
        limits: of the search.
        c: the chunk's index on its stage.
        ids: a number for every choice, shared by all chunks of the stage.
    """

    def __init__(self, limits: Limits, c: int, ids: dict[LayerPolicy, int]) -> None:
        self.limits, self.chunk, self.ids = limits, limits.problem.chunks[c], ids
        self.own = (limits.problem.running == c) & ~limits.problem.is_forward

    def search(self, filters: Filters) -> tuple[Labels, Ints]:
        """All labels that `filters` keep, and among them those that cover the whole chunk."""
        chunk = self.chunk
        labels = Labels()
        rows = np.zeros((1, len(COLUMNS)), np.int64)
        rows[:, FIRST] = rows[:, PARENT] = -1
        rows[:, POSITION] = len(chunk.layers)
        for unit in reversed(chunk.after):
            rows = self._prepend_unit(rows, unit, chunk.output_gradient_bytes)
        labels.append(rows, len(chunk.layers))
        for position in reversed(range(len(chunk.layers))):
            rows = np.concatenate([self._alone(labels, position), self._together(labels, position)])
            rows[:, POSITION] = position
            labels.append(filters(rows, position), position)
        final, start = labels.of(0, 0)
        final = final.copy()
        final[:, PARENT] = start + np.arange(len(final))
        for unit in reversed(chunk.before):
            final = self._prepend_unit(final, unit, chunk.output_gradient_bytes)
        return labels, final

    def _prepend_unit(self, rows: Ints, unit: Unit, output_gradient_bytes: int) -> Ints:
        held = np.int64(unit.held_bytes)
        rows = rows.copy()
        rows[:, TIME] += self.chunk.unit_ps(unit)
        rows[:, APART] += np.array([unit.forward_ps, unit.backward_ps])
        rows[:, HELD] += held
        backward = unit.backward_transient_bytes + output_gradient_bytes
        rows[:, FORWARD] = held + np.maximum(rows[:, FORWARD], unit.forward_transient_bytes)
        rows[:, BACKWARD] = held + np.maximum(rows[:, BACKWARD], backward)
        return rows

    def _alone(self, labels: Labels, position: int) -> Ints:
        """Every choice of one layer before every label of the next position."""
        chunk = self.chunk
        single = chunk.singles[position]
        later, start = labels.of(position + 1, position + 1)
        pick = np.repeat(np.arange(len(single.policies)), len(later))
        ids = np.array([self._id(policy) for policy in single.policies], np.int64)
        last = position + 1 == len(chunk.layers) and not chunk.after
        gradient = single.kept_gradient[pick] if last else chunk.output_gradient_bytes
        return prepend(
            np.tile(later, (len(single.policies), 1)),
            np.tile(np.arange(start, start + len(later)), len(single.policies)),
            (single.held[pick], single.forward[pick], single.backward[pick] + gradient),
            (
                chunk.single_ps[position][pick],
                single.forward_ps[pick],
                single.backward_ps[pick],
            ),
            ids[pick],
        )

    def _together(self, labels: Labels, position: int) -> Ints:
        """Every checkpoint of two or more layers before the labels where it ends."""
        chunk = self.chunk
        group = chunk.groups[position]
        # Longer groups mostly reach higher; this skips those that can never fit.
        reach = group.held_bytes + group.backward_transient_bytes
        fitting = np.flatnonzero(reach <= self.limits.room[self.own].max(initial=0))
        most = int(fitting[-1]) + 1 if len(fitting) else 0
        if most < 2:
            return np.zeros((0, len(COLUMNS)), np.int64)
        later, start = labels.of(position + 2, position + most)
        pick = later[:, POSITION] - position - 1
        not_last = (later[:, POSITION] < len(chunk.layers)) | bool(chunk.after)
        backward = group.backward_transient_bytes[pick] + chunk.output_gradient_bytes * not_last
        return prepend(
            later.copy(),
            np.arange(start, start + len(later)),
            (group.held_bytes[pick], group.forward_transient_bytes[pick], backward),
            (
                chunk.group_ps[position][pick],
                group.forward_ps[pick],
                group.backward_ps[pick],
            ),
            GROUP_IDS + pick + 1,
        )

    def _id(self, policy: LayerPolicy) -> int:
        return self.ids.setdefault(policy, len(self.ids))


class Filters:
    """Drops the labels of one chunk that cannot be part of the answer."""

    def __init__(
        self,
        limits: Limits,
        c: int,
        chunk_bounds: Sequence[float],
        upper_ps: int | None,
        width: int,
    ) -> None:
        problem = limits.problem
        self.limits, self.c, self.upper_ps, self.width = limits, c, upper_ps, width
        self.left = math.inf  # least time plus priced bytes of the labels that were cut off
        chunk = problem.chunks[c]
        held, forward, backward = limits.prices(c)
        self.before_price = chunk.covering(held + forward + backward)
        self.others_price = math.fsum(b for i, b in enumerate(chunk_bounds) if i != c)
        self.least_held = chunk.least_held
        self.counts = problem.counts[:, c]
        self.own = problem.running == c
        least = np.array([other.least_total for other in problem.chunks], np.int64)
        least_others = problem.counts @ least - self.counts * least[c]
        room = limits.room - least_others - np.where(self.own, 0, least[problem.running])
        # Per (microbatches in flight, column of M if this chunk runs else 0) the least room.
        column = np.where(self.own, np.where(problem.is_forward, FORWARD, BACKWARD), 0)
        self.rooms: dict[tuple[int, int], int] = {}
        for *key, bytes_left in zip(self.counts, column, room, strict=True):
            pair = (int(key[0]), int(key[1]))
            self.rooms[pair] = min(int(bytes_left), self.rooms.get(pair, int(NO_LIMIT)))

    def __call__(self, rows: Ints, position: int) -> Ints:
        """Keep labels that fit, may win and are not dominated; at most `width` of them."""
        self.limits.tally.rows(*rows.shape)
        rows = rows[self._fits(rows, position)]
        price = self.limits.priced(rows, self.c) + self.before_price[position] + self.others_price
        may_win = self.limits.may_win(price, self.upper_ps)
        rows, price = rows[may_win], price[may_win]
        kept = front(self._dims(rows), rows[:, RUNS], rows[:, FIRST], self.limits.tally)
        width = self.limits.tally.width(self.width)
        if len(kept) > width:
            chosen = spread(price[kept], rows[kept, HELD], width)
            self.left = min(self.left, float(np.delete(price[kept], chosen).min()))
            kept = kept[chosen]
        return rows[kept]

    def _fits(self, rows: Ints, position: int) -> Bools:
        """Whether labels fit at every moment; earlier layers and other chunks hold their least."""
        before = self.least_held[position]
        fits = np.ones(len(rows), np.bool_)
        for (count, column), room in self.rooms.items():
            highest = rows[:, column] + before if column else 0
            fits &= count * (rows[:, HELD] + before) + highest <= room
        return fits

    def _dims(self, rows: Ints) -> Ints:
        """What a label must not be worse in: times, H where it waits, count * H + M where it runs.

        M itself is not compared: a label that holds less may run higher by what its other
        microbatches in flight save. Of several counts the least is the strictest.
        """
        columns = [rows[:, TIME]]
        if self.limits.apart:
            columns += [rows[:, column] for column in APART]
        if self.counts.any():
            columns.append(rows[:, HELD])
        for forward, column in ((True, FORWARD), (False, BACKWARD)):
            mine = self.own & (self.limits.problem.is_forward == forward)
            if mine.any():
                columns.append(self.counts[mine].min() * rows[:, HELD] + rows[:, column])
        return np.column_stack(columns)
