"""Measures a job's layers on one device; here, how often: a profile of any model takes a minute."""

from megatron_autorecompute.runtime.samples import SAMPLES, TURNS

MOST, LEAST = SAMPLES, TURNS
STEPS = 160
"""A model of one layer of every kind needs a step for every choice and repeat, and one for each of
its turns; one takes some 0.1 s to 0.2 s on a GPU. Choices of several modules take none: what they
take is added up from their modules (`runtime.samples.of_parts`)."""


def default_repeats(choices: int) -> int:
    """Repeats for a model whose layers have at most so many choices that are timed."""
    return max(LEAST, min(MOST, STEPS // choices - TURNS))
