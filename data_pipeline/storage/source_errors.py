"""Errors of reading a stream, and which of them say nothing about the content that was read."""

import errno


class SourceError(OSError):
    """A stream that cannot be read on; its text says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)

    @property
    def reason(self) -> str:
        return str(self.strerror)


class UnreachableError(SourceError):
    """The network or the server failed, not what it serves: another time it may be read."""


def is_passing(error: BaseException | None) -> bool:
    """Whether `error`, or what led to it, is a failure of the surroundings that may pass.

    A failing disk or server is; a missing or forbidden file and a damaged one stay as they are.
    """
    while error is not None:
        if isinstance(error, SourceError):
            return isinstance(error, UnreachableError)
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            return False
        if isinstance(error, OSError) and error.errno:  # libraries' own, of bad bytes, have none
            return error.errno != errno.EINVAL  # of a Parquet file that points before its start
        error = error.__cause__ or error.__context__
    return False


def is_unread(error: BaseException | None) -> bool:
    """Whether `error`, or what led to it, is a failure to read: it says nothing of the content.

    A missing file, or a folder in its place, says enough.
    """
    while error is not None:
        if isinstance(error, OSError):
            missing = FileNotFoundError | IsADirectoryError | NotADirectoryError
            return not isinstance(error, missing)
        error = error.__cause__ or error.__context__
    return False


def explain(error: OSError) -> str:
    """An OSError as the reason of a Reject."""
    if isinstance(error, SourceError):
        return error.reason
    return f"cannot be read: {error.strerror or type(error).__name__}"
