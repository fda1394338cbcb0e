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
    """A policy cannot be applied: already held, ranks disagree, or a step auto cannot measure."""

    exit_code = 6


class MachineError(AutorecomputeError):
    """The machine lacks something the command needs: a port, a compiler, a device."""

    exit_code = 7


class PipelineError(AutorecomputeError):
    """A layout, schedule or its times are such as Megatron itself would refuse or cannot be."""

    exit_code = 8


class OptionError(AutorecomputeError):
    """Command-line options contradict each other or cannot be meant."""

    exit_code = 9


class VerificationError(AutorecomputeError):
    """Megatron's own schedule needs more than a plan's budget, or other bytes than predicted."""

    exit_code = 10


class LostStepsError(AutorecomputeError):
    """Steps run out of memory one after another, whatever is recomputed."""

    exit_code = 13
