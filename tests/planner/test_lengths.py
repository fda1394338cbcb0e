"""A plan for the longest microbatch bounds every arrangement of shorter ones."""

import itertools
import random
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.lines import Line, Microbatch, RecordLines, envelope, middle_line
from megatron_autorecompute.planner.cost.lengths import Arrangement, profile_at
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Profile,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.planner.random_profiles import drawn

LONGEST = 9


def varying(seed):
    """A random problem whose figures are random lines, some with a quadratic term."""
    profile, layout, schedule, _ = drawn(seed)
    rng = random.Random(seed)

    def line(least=0, steepest=9):
        bent = rng.random() < 0.3
        squares, routed = rng.randint(0, 2) * bent, rng.randint(0, 2)
        return Line(rng.randint(least, 40), rng.randint(0, steepest), squares, routed)

    def lines(record):
        held = line()
        # Of one kind: more recompute takes as long or longer, whatever the length.
        times = Line(0.0, record.forward_ms), Line(0.0, record.backward_ms)
        return replace(record, lines=RecordLines(held, line(), line(), *times))

    overhead = ScheduleOverhead(0, 0, line(), line())
    stages = tuple(
        StageRecord(
            tuple(layer for chunk in chunks for layer in chunk.layers),
            StaticBytes(rng.randint(0, 9)),
            overhead=overhead,
        )
        for chunks in layout.stages
    )
    norm = profile.final_norm
    varied = replace(
        profile,
        kinds=tuple(replace(k, choices=tuple(map(lines, k.choices))) for k in profile.kinds),
        embedding=lines(profile.embedding),
        head=lines(profile.head),
        final_norm=None if norm is None else lines(norm),
        stages=stages,
        boundary_line=Line(0, rng.randint(0, 3)),
        routed_line=Line(rng.randint(0, 9), rng.randint(0, 3)),
    )
    return varied, layout, schedule, rng


def random_policy(rng, profile):
    kind_of = {layer: kind for kind in profile.kinds for layer in kind.layers}
    return RecomputePolicy(
        tuple(rng.choice(kind_of[i].choices).policy for i in range(profile.num_layers))
    )


@pytest.mark.parametrize("seed", range(16))
def test_no_arrangement_needs_more_than_the_plan_for_the_longest(seed):
    profile, layout, schedule, rng = varying(seed)
    policy = random_policy(rng, profile)
    m = schedule.num_microbatches
    longest = profile_at(profile, Microbatch.longest(LONGEST), m * LONGEST)
    bound = [c.peak.bytes for c in Problem(longest, layout, schedule).cost(policy).stages]

    def peaks(lengths, routed=()):
        ones = tuple(map(Microbatch.longest, lengths))
        return Arrangement(profile, layout, schedule, policy, ones, routed).peaks()

    def routed():
        """Up to as many tokens for every layer's experts as the longest microbatch may bring."""
        most = int(profile.routed_line.at(Microbatch.longest(LONGEST)))
        return tuple({n: rng.randint(0, most) for n in range(profile.num_layers)} for _ in range(m))

    assert peaks([LONGEST] * m) == bound  # reached
    every = list(itertools.product((1, 5, LONGEST), repeat=m))
    for lengths in rng.sample(every, min(len(every), 30)):
        found = *peaks(lengths), *peaks(lengths, routed())
        assert all(own <= most for own, most in zip(found, 2 * bound, strict=True))


def test_a_call_is_a_sum_over_its_own_microbatches():
    """One stage, none recomputed: static, what the loop holds, and the running microbatch alone."""
    profile, layout, schedule, rng = varying(next(s for s in range(99) if is_plain(s)))
    policy = random_policy(rng, profile)
    m = schedule.num_microbatches
    lengths = [rng.randint(1, LONGEST) for _ in range(m)]
    ones = tuple(map(Microbatch.longest, lengths))
    (mixed,) = Arrangement(profile, layout, schedule, policy, ones).peaks()
    alone = []
    for one in ones:
        at = profile_at(profile, one, sum(lengths))
        alone.append(Problem(at, layout, schedule).cost(policy).stages[0].peak.bytes)
    assert mixed == max(alone)  # on one stage no microbatch waits for another


def is_plain(seed):
    _, layout, schedule, _ = varying(seed)
    return layout.num_stages == 1 and schedule.num_microbatches > 2 and not layout.mtp_num_layers


def test_a_profile_of_one_length_is_refused():
    profile, layout, schedule, rng = varying(0)
    policy = random_policy(rng, profile)
    fixed = replace(profile, boundary_line=None)
    ones = (Microbatch.longest(3),) * schedule.num_microbatches
    with pytest.raises(ProfileError, match="one length only"):
        Arrangement(fixed, layout, schedule, policy, ones)


def test_where_the_lines_of_two_choices_cross_more_work_is_no_faster():
    profile, *_ = varying(0)
    flat, steep = Line(0.0, 2.0), Line(6.0, 0.5)  # equal for 4 tokens
    lines = RecordLines(Line(1, 1), Line(2, 1), Line(2, 1), flat, flat)
    none = ChoiceRecord("none", 9, 0, 0, 10.0, 10.0, lines=lines)
    slower = replace(lines, forward_ms=steep, backward_ms=steep)
    full = replace(none, choice="full", forward_ms=8.0, backward_ms=12.0, lines=slower)
    kind = LayerKind("dense", tuple(range(profile.num_layers)), (none, full))
    for tokens in (1, 9):
        (found,) = profile_at(replace(profile, kinds=(kind,)), Microbatch.longest(tokens), 9).kinds
        times = [record.forward_ms + record.backward_ms for record in found.choices]
        assert times[0] < times[1]
        own = [2 * line.at(Microbatch.longest(tokens)) for line in (flat, steep)]
        assert sum(times) == pytest.approx(sum(own)) if tokens == 9 else times == own


def test_lines_survive_a_file():
    profile, *_ = varying(3)
    assert Profile.from_json(profile.to_json()) == profile


# --- fits -----------------------------------------------------------------------------------------


def points(figure, lengths, routed=lambda t: t):
    found = (Microbatch(t, t * t, routed(t)) for t in lengths)
    return [(one, float(figure(one))) for one in found]


def test_exact_lines_are_found():
    seen = points(lambda one: 36 + 4256 * one.tokens, (24, 64, 200))
    line = envelope(seen)
    assert line.bytes_at(Microbatch.longest(4096)) == pytest.approx(36 + 4256 * 4096, abs=1)
    assert line.residual < 1e-9
    assert line.most_tokens == 200


def test_a_quadratic_term_is_found_where_points_do_not_lie_on_a_line():
    seen = points(lambda one: 4256 * one.tokens + 36 * one.squares, (24, 64, 130, 200))
    line = envelope(seen)
    assert line.per_square == pytest.approx(36)
    assert line.residual < 1e-9


def test_tokens_routed_to_a_rank_have_their_own_slope():
    routed = {10: 70, 50: 60, 90: 200, 100: 110}
    seen = points(lambda one: 7 * one.tokens + 3 * one.routed_tokens, routed, routed.get)
    line = envelope(seen, experts=True)
    assert (line.per_token, line.per_routed_token) == pytest.approx((7, 3))


@pytest.mark.parametrize("seed", range(20))
def test_no_point_lies_above_an_envelope_and_no_slope_is_negative(seed):
    rng = random.Random(seed)
    seen = points(
        lambda one: rng.uniform(0, 9) * one.tokens + rng.uniform(0, 99),
        [rng.randint(1, 99) for _ in range(rng.randint(1, 9))],
    )
    line = envelope(seen)
    assert all(line.bytes_at(one) >= value - 1e-6 * value for one, value in seen)
    assert min(line.constant, line.per_token, line.per_square, line.per_routed_token) >= 0


def test_one_length_scales_up_in_proportion():
    line = envelope(points(lambda one: 100 * one.tokens, (8, 8)))
    assert line.bytes_at(Microbatch.longest(80)) == 8000


def test_a_single_slow_microbatch_does_not_turn_a_line_of_times():
    seen = points(lambda one: 2 + 0.5 * one.tokens, range(10, 100, 5))
    seen[3] = (seen[3][0], 500.0)
    line = middle_line(seen)
    assert line.at(Microbatch.longest(60)) == pytest.approx(32, rel=0.1)
