"""Errors, each with the setting, lane or file to look at in its message."""


class DeepOptimizerStatesError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(DeepOptimizerStatesError, ValueError):
    """A setting is wrong or cannot be honoured; the message says what to do instead."""


class PlanError(DeepOptimizerStatesError, ValueError):
    """An update plan breaks one of its invariants."""


class UnsupportedDeepSpeedError(DeepOptimizerStatesError, RuntimeError):
    """The installed DeepSpeed is not one whose internals this package was checked against."""


class KernelError(DeepOptimizerStatesError, RuntimeError):
    """The Adam kernel cannot be built, or cannot repeat DeepSpeed's arithmetic on this machine."""


class UpdateError(DeepOptimizerStatesError, RuntimeError):
    """Work on a lane failed or did not end in time; names the lane and the work."""


class HostMemoryError(DeepOptimizerStatesError, MemoryError):
    """Host memory does not suffice for the optimizer state; says how much is needed and free."""


class CheckpointError(DeepOptimizerStatesError, RuntimeError):
    """A checkpoint is not whole, or does not fit; names it, says why and what to do."""
