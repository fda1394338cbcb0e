"""Names of points stand beside them and never on each other."""

import itertools
import random

import pytest

from megatron_autorecompute.report.chart import Box, beside

INSIDE = Box(0, 0, 800, 500)


def mark(point):
    return Box(point[0] - 4, point[1] - 4, 8, 8)


def placed(points, extent, inside, taken=()):
    """A box for each point, one after the other."""
    boxes = []
    for point in points:
        boxes.append(beside(point, extent, inside, [*taken, *map(mark, points), *boxes]))
    return boxes


@pytest.mark.parametrize("seed", range(50))
def test_names_overlap_neither_each_other_nor_points_nor_what_is_kept_free(seed):
    rng = random.Random(seed)
    points = [(rng.uniform(20, 780), rng.uniform(20, 480)) for _ in range(15)]
    line = Box(400, 0, 2, 500)
    boxes = placed(points, (rng.uniform(30, 120), 12), INSIDE, [line])
    assert all(box.within(INSIDE) for box in boxes)
    for first, second in itertools.combinations([*boxes, line], 2):
        assert not first.overlaps(second)
    for box, point in itertools.product(boxes, points):
        assert not box.overlaps(mark(point))


def test_of_free_places_the_nearest_to_the_right_is_taken():
    assert beside((100, 100), (50, 10), INSIDE, []) == Box(107, 95, 50, 10)


def test_where_there_is_no_room_there_is_no_place():
    assert beside((20, 10), (30, 12), Box(0, 0, 40, 20), []) is None
    assert beside((100, 100), (50, 10), INSIDE, [INSIDE]) is None
