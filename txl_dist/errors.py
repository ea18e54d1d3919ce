"""The errors that this project raises on purpose, and their exit codes.

    TxlError                1   any other failure
      ConfigError           2   invalid or contradictory command line or configuration
      DataError             3   input text, shards or a manifest that must not be used
        UnfinishedError     3   preparation that was interrupted; the same command resumes it
        UnreadableError     3   a dataset that its storage did not deliver; it may be intact
      ReadFailureError      1   data that cannot be read now; it may be intact
      CheckpointError       4   damaged, incomplete or incompatible checkpoint
        FencedError         4   a newer attempt of the run owns its checkpoints
        StoreError          4   checkpoints, or their URL, cannot be read now
      DivergedError         5   loss or gradient that is not finite, or a spike
      LostRankError         1   no reply from other ranks in a collective
      PreemptedError       75   stopped on request; resumable (EX_TEMPFAIL)

`data_pipeline/errors.py` defines the errors of data. A message has the facts, the expectation, the
likely cause and the next command. Only the command line turns an error into an exit.
"""

import errno
import json
import sys
from contextlib import suppress

from data_pipeline.errors import ConfigError, DataError, TxlError, UnreadableError, printable
from data_pipeline.system.signals import STOPPED_EXIT_CODE

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FencedError",
    "LostRankError",
    "PreemptedError",
    "StoreError",
    "TxlError",
    "UnreadableError",
]


class CheckpointError(TxlError):
    """A checkpoint that is damaged, incomplete or from a different model."""

    exit_code = 4


class FencedError(CheckpointError):
    """A newer attempt of this run owns its checkpoints: this one stops and changes nothing."""


class StoreError(CheckpointError):
    """The storage of the checkpoints, or of their copies, did not deliver them."""


OUTAGES = (UnreadableError, StoreError)
"""Errors of storage that may work again: a launch that has trained starts its ranks again."""


class DivergedError(TxlError):
    """A loss or gradient that is not finite, or a spike. Every rank stops before the update."""

    exit_code = 5


class LostRankError(TxlError):
    """Other ranks did not take part in a collective. The cause is in the logs of those ranks."""


class PreemptedError(TxlError):
    """The run received a stop request, saved its state and can be resumed (EX_TEMPFAIL)."""

    exit_code = STOPPED_EXIT_CODE


def error_of_files(error: OSError) -> TxlError | None:
    """The message of a file or an output that a command cannot use; None for other errors of the
    system, such as those of networks, which name no file.
    """
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return None
    path = "the output" if error.filename is None else printable(str(error.filename))
    return TxlError(
        f"{path}: {error.strerror}. Check the path, its permissions (ls -ld) and the free space "
        "(df), or choose another place; then run the command again"
    )


def print_error(error: TxlError) -> None:
    # A stop on request is not a failure, so its message has no error name in front.
    name = "" if isinstance(error, PreemptedError) else f"{type(error).__name__}: "
    with suppress(OSError):  # the terminal is gone; the exit code still tells
        print(f"{name}{error}", file=sys.stderr, flush=True)


def error_to_json(error: TxlError, *, max_chars: int | None = None) -> bytes:
    """One line that `error_from_json` of another process turns back into the error."""
    content = {"type": type(error).__name__, "message": str(error)[:max_chars]}
    return json.dumps(content).encode() + b"\n"


def error_from_json(line: bytes) -> TxlError:
    content = json.loads(line)
    name = content["type"] if content["type"] in __all__ else "TxlError"
    error: TxlError = globals()[name](content["message"])
    return error
