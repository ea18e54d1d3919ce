"""Errors of reading a stream, and the classification that decides between retry and rejection."""

import errno
from collections.abc import Iterator


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
    for each in _chain(error):
        if isinstance(each, SourceError):
            return isinstance(each, UnreachableError)
        if isinstance(each, FileNotFoundError | PermissionError | IsADirectoryError):
            return False
        # The OSErrors that libraries raise for damaged content have no errno.
        if isinstance(each, OSError) and each.errno:
            return each.errno != errno.EINVAL  # a damaged Parquet file seeks before its start
    return False


def is_read_failure(error: BaseException | None) -> bool:
    """Whether `error` or one of its causes is a failure to read, so the content is unknown.

    False for a missing file and for a folder with its name: those are certain.
    """
    missing = FileNotFoundError | IsADirectoryError | NotADirectoryError
    first = next((each for each in _chain(error) if isinstance(each, OSError)), None)
    return first is not None and not isinstance(first, missing)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reject_reason(error: OSError) -> str:
    """The text of an OSError, for `Reject.reason`."""
    if isinstance(error, SourceError):
        return error.reason
    return f"cannot be read: {error.strerror or type(error).__name__}"
