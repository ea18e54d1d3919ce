"""The errors of training, beside those of the data (`data_pipeline/errors.py`)."""

from data_pipeline.errors import ConfigError, DataError, TxlError
from data_pipeline.processes.stop_signals import STOPPED_EXIT_CODE

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "LostRankError",
    "PreemptedError",
    "TxlError",
]


class CheckpointError(TxlError):
    """A checkpoint that is damaged, incomplete or of another model."""

    exit_code = 4


class DivergedError(TxlError):
    """The loss or a gradient is not finite; every rank stops before the optimizer step."""

    exit_code = 5


class LostRankError(TxlError):
    """Other ranks did not answer in a collective: a consequence, whose cause is theirs."""


class PreemptedError(TxlError):
    """The run was asked to stop, saved its state and can be resumed (EX_TEMPFAIL)."""

    exit_code = STOPPED_EXIT_CODE


def error_of(name: str, message: str) -> TxlError:
    """The error of that class name, as another process raised it."""
    classes = (
        ConfigError,
        DataError,
        CheckpointError,
        DivergedError,
        LostRankError,
        PreemptedError,
    )
    return {c.__name__: c for c in classes}.get(name, TxlError)(message)
