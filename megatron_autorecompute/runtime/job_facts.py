"""What the program around a training says of it: all that `controller` has to be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.runtime.probe import Memory


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the program around says of the training job."""

    parallelism: Parallelism
    """Shapes of a microbatch on this rank."""

    num_microbatches: Callable[[], int]
    """Microbatches of the next step; may change with batch-size ramp-up."""

    say: Callable[[str], None]
    """Prints on one rank."""

    timers: Any | None = None
    """Megatron's Timers, which run in measuring steps: what they say stands beside the sum of
    layers, and what layers leave of it is the stage's residual."""

    shapes: Mapping[str, str] = field(default_factory=dict)
    """What besides `parallelism` a plan holds for: the decoder's sequence length of T5."""

    writers: Callable[[], Sequence[Any]] = lambda: ()
    """TensorBoard and W&B writers that are on."""

    iteration: Callable[[], int] | None = None
    """The step's number in the training as a whole, for the writers; None counts from the start
    of this job."""

    without_cuda: bool = False
    """Bytes come from `LiveBytes`, as there is no allocator to ask."""

    memory: Callable[[], AbstractContextManager[Memory]] | None = None
    """Another place to read bytes from, in every step; for tests that enforce a budget."""
