"""Measures one rank's layers of a job on one device, with collectives that move no data."""

MOST, LEAST = 7, 4
STEPS = 160
"""In about a minute: a model of one layer of every kind needs a step for every choice and repeat,
and one takes some 0.1 s to 0.2 s on a GPU."""


def default_repeats(choices: int) -> int:
    """Repeats for a model whose layers have at most so many choices."""
    return max(LEAST, min(MOST, STEPS // choices))
