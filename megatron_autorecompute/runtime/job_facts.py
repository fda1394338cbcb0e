"""Facts about a training job: what a program tells `attach`, and what `controller` needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.calls import Calls, CallShape, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCalls:
    """What every training call of a loop has; all are alike.

    Raises OptionError for a number that is not positive.
    """

    num_microbatches: int
    """The number of microbatches of a step on every data-parallel rank."""
    micro_batch_size: int
    """Samples per microbatch on one rank."""
    seq_length: int
    """Tokens per sample."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if (whole(value) or 0) < 1:
                raise OptionError(f"FixedCalls({name}={value!r}): give a number of 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What a program logs with, and what its plans depend on besides Megatron's configs."""

    timers: Any | None = None
    """Megatron's Timers, read in measuring steps. They are shown beside the sum of layers, and the
    difference is the stage's residual."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Further shapes that must be equal for a plan to be used: T5's decoder sequence length."""
    writers: Callable[[], Sequence[Any]] = lambda: ()
    """TensorBoard and W&B writers that are on."""
    iteration: Callable[[], int] | None = None
    """The step's number in the whole training, for the writers; None: counted in this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Reporting):
    """What a training program tells `attach` whose microbatches have one length and whose loop goes
    on after a skipped update: Megatron-LM, Megatron Bridge."""

    options: AutoOptions
    """The options as the user gave them."""
    save: str | None = None
    """The folder of the job's checkpoints, made if it is missing; the plan goes there if no path
    was given."""
    micro_batch_size: int
    """Samples per microbatch on one data-parallel rank."""
    seq_length: int
    """Tokens per sample."""


@dataclass(frozen=True, slots=True)
class JobFacts(Reporting):
    """Facts about a training job, collected by `attach`."""

    parallelism: Parallelism
    """Shapes of a microbatch on this rank."""

    num_microbatches: Callable[[], int]
    """Microbatches of the next step; may change with batch-size ramp-up."""

    say: Callable[[str], None]
    """Prints on one rank."""

    without_cuda: bool = False
    """Whether there is no CUDA; bytes then come from `LiveBytes`."""

    calls: Calls | None = None
    """What ranks agree on before each call of a loop whose calls differ. Such a loop does not go on
    after a skipped update, so running out of memory is raised."""

    on_close: Callable[[], None] = lambda: None
    """Called when auto ends, with the model given back."""

    @property
    def shape(self) -> CallShape | None:
        """What the next call's plan depends on; None if no length is known, or all are alike."""
        return self.calls.shape if self.calls is not None and self.calls.shape.tokens else None
