"""Which failures may pass, and which say nothing about the content."""

import pytest

from data_pipeline.storage.source_errors import (
    SourceError,
    UnreachableError,
    is_read_failure,
    is_transient,
    reject_reason,
)


@pytest.mark.parametrize(
    ("error", "transient", "read_failure"),
    [
        (UnreachableError("the connection broke"), True, True),
        (OSError(5, "Input/output error"), True, True),
        (SourceError("damaged gzip stream"), False, True),
        (PermissionError(13, "Permission denied"), False, True),
        (FileNotFoundError(2, "No such file"), False, False),
        (IsADirectoryError(21, "Is a directory"), False, False),
        (OSError(22, "Invalid argument"), False, True),
        (ValueError("wrong content"), False, False),
        (None, False, False),
    ],
)
def test_an_error_and_what_it_caused_are_classified_alike(
    error: Exception | None, transient: bool, read_failure: bool
) -> None:
    wrapped = ValueError("raised from it")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        assert is_transient(each) == transient
        assert is_read_failure(each) == read_failure


def test_the_reason_of_an_os_error_is_readable() -> None:
    assert reject_reason(SourceError("truncated gzip stream")) == "truncated gzip stream"
    assert reject_reason(OSError(5, "Input/output error")) == "cannot be read: Input/output error"
    assert reject_reason(TimeoutError()) == "cannot be read: TimeoutError"
