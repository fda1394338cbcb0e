"""Every error this package raises on purpose, with the exit code its commands end with."""


class AutorecomputeError(Exception):
    """Base of all deliberate errors: the message says what was asked, found, and what to do."""

    exit_code = 1


class PolicyError(AutorecomputeError):
    """A policy cannot be read, does not fit the model, or is refused by Megatron's own rules."""

    exit_code = 2


class InfeasibleError(AutorecomputeError):
    """No policy fits the memory budget."""

    exit_code = 3


class ProfileError(AutorecomputeError):
    """A profile or plan file is missing, damaged, contradictory, or of another model."""

    exit_code = 4


class UnsupportedVersionError(AutorecomputeError):
    """The installed megatron-core is one whose sources this package does not know."""

    exit_code = 5


class ApplyError(AutorecomputeError):
    """A policy is already in force, ranks have different ones, or auto cannot measure a step."""

    exit_code = 6


class MachineError(AutorecomputeError):
    """The machine lacks something: a package, a compiler, a device, a file; or a rank died."""

    exit_code = 7


class PipelineError(AutorecomputeError):
    """A layout or schedule that Megatron itself refuses, or times that are impossible."""

    exit_code = 8


class OptionError(AutorecomputeError):
    """Options contradict each other, a value is impossible, or a job description is no job's."""

    exit_code = 9


class VerificationError(AutorecomputeError):
    """Megatron's own schedule exceeds a plan's budget or differs from its predicted bytes."""

    exit_code = 10


class LostStepsError(AutorecomputeError):
    """Several steps in a row ran out of memory, the last one under the leanest policy."""

    exit_code = 13
