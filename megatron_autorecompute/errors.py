"""Every error this package raises on purpose, with the exit code its commands end with."""


class AutorecomputeError(Exception):
    """The base of all deliberate errors. The message says what was asked, what was found, and what
    to do. A closed output pipe, as by `head`, ends with this code as well."""

    exit_code = 1


class PolicyError(AutorecomputeError):
    """A policy cannot be read, does not fit the model, or is refused by Megatron's own rules. Wrong
    command-line arguments end with this code as well."""

    exit_code = 2


class InfeasibleError(AutorecomputeError):
    """No policy fits the memory budget."""

    exit_code = 3


class ProfileError(AutorecomputeError):
    """A profile or plan file is missing, damaged, contradictory or of another model, or cannot be
    written."""

    exit_code = 4


class UnsupportedVersionError(AutorecomputeError):
    """This package does not know the sources of the installed megatron-core."""

    exit_code = 5


class ApplyError(AutorecomputeError):
    """A policy is already in force, the ranks of a stage have different ones, or `auto` cannot
    measure this training step."""

    exit_code = 6


class MachineError(AutorecomputeError):
    """The machine lacks something: a package, CUDA, a compiler, memory, a readable file, or a place
    to write to. Or a rank died."""

    exit_code = 7


class PipelineError(AutorecomputeError):
    """Megatron itself refuses the layout or the schedule, or times are impossible."""

    exit_code = 8


class OptionError(AutorecomputeError):
    """Options contradict each other or have no effect, a value is impossible, an output is an
    input, or a job description (YAML file, flags, recipe) is missing or describes no job that can
    run."""

    exit_code = 9


class VerificationError(AutorecomputeError):
    """Megatron's own schedule exceeds a plan's budget, or differs from the predicted bytes by more
    than `verify` allows."""

    exit_code = 10
