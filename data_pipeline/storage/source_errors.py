"""Errors of reading a stream, and the classification that decides between retry and rejection."""

import errno


class SourceError(OSError):
    """A stream that cannot be read any further. `reason` is the text for the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)

    @property
    def reason(self) -> str:
        return str(self.strerror)


class UnreachableError(SourceError):
    """The network or the server failed. A later attempt may succeed."""


def is_transient(error: BaseException | None) -> bool:
    """Whether `error` or one of its causes is a failure that may pass.

    True for a failing disk or server; False for a missing, forbidden or damaged file.
    """
    while error is not None:
        if isinstance(error, SourceError):
            return isinstance(error, UnreachableError)
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            return False
        # The OSErrors that libraries raise for damaged content have no errno.
        if isinstance(error, OSError) and error.errno:
            return error.errno != errno.EINVAL  # a damaged Parquet file seeks before its start
        error = error.__cause__ or error.__context__
    return False


def is_unread(error: BaseException | None) -> bool:
    """Whether `error` or one of its causes is a failure to read, so the content is unknown.

    False for a missing file and for a folder with its name: those are certain.
    """
    while error is not None:
        if isinstance(error, OSError):
            missing = FileNotFoundError | IsADirectoryError | NotADirectoryError
            return not isinstance(error, missing)
        error = error.__cause__ or error.__context__
    return False


def reject_reason(error: OSError) -> str:
    """The text of an OSError, for `Reject.reason`."""
    if isinstance(error, SourceError):
        return error.reason
    return f"cannot be read: {error.strerror or type(error).__name__}"
