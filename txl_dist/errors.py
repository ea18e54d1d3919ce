"""The errors that this project raises on purpose, and their exit codes.

    TxlError                1   any other failure
      ConfigError           2   invalid or contradictory command line or configuration
      DataError             3   input text, shards or a manifest that must not be used
        UnfinishedError     3   preparation that was interrupted; the same command resumes it
      UnreadError           1   data that cannot be read now; it may be intact
      CheckpointError       4   damaged, incomplete or incompatible checkpoint
      DivergedError         5   loss or gradient that is not finite
      LostRankError         1   other ranks that do not answer
      PreemptedError       75   stopped on request; resumable (EX_TEMPFAIL)

`data_pipeline/errors.py` defines those of the data. A message says what was found, what was
expected, the likely cause and the next command. Only the command line turns one into an exit.
"""

from data_pipeline.errors import ConfigError, DataError, TxlError

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
    """The loss or a gradient is not finite. Every rank stops before the optimizer step."""

    exit_code = 5


class LostRankError(TxlError):
    """Other ranks did not answer in a collective. Their own error is the cause of the failure."""


class PreemptedError(TxlError):
    """The run was asked to stop, saved its state and can be resumed (EX_TEMPFAIL)."""

    exit_code = 75


def error_of(name: str, message: str) -> TxlError:
    """Recreate an error that another process raised, from the name of its class."""
    classes = (
        ConfigError,
        DataError,
        CheckpointError,
        DivergedError,
        LostRankError,
        PreemptedError,
    )
    return {cls.__name__: cls for cls in classes}.get(name, TxlError)(message)
