"""URLs: how they are displayed in messages, and which failed requests are retried."""

from collections.abc import Iterator

import pytest

from data_pipeline.storage import urls
from data_pipeline.storage.source_errors import SourceError, UnreachableError
from data_pipeline.storage.urls import retry_request, shown


class Requests:
    """A request that raises the given errors, one per attempt, and then returns 7."""

    def __init__(self, *errors: BaseException) -> None:
        self.attempts = 0
        self._errors: Iterator[BaseException] = iter(errors)

    def __call__(self) -> int:
        self.attempts += 1
        for error in self._errors:
            raise error
        return 7


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_FIRST_WAIT_SECONDS", 0.001)


@pytest.mark.fault_row(19)
def test_a_request_is_retried_twice() -> None:
    requests = Requests(OSError(5, "reset"), ValueError("a client library's own error"))
    assert retry_request(requests) == 7
    assert requests.attempts == 3


@pytest.mark.fault_row(19)
def test_the_third_failure_is_an_unreachable_error_without_secrets() -> None:
    requests = Requests(*[RuntimeError("GET https://me:secret@host/a?token=secret failed")] * 3)
    with pytest.raises(UnreachableError, match=r"after 3 attempts: GET https://host/a failed$"):
        retry_request(requests)
    assert requests.attempts == 3


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), IsADirectoryError()])
def test_a_missing_or_forbidden_object_is_not_retried(error: OSError) -> None:
    requests = Requests(error)
    with pytest.raises(SourceError, match=f"cannot be read: {type(error).__name__}") as raised:
        retry_request(requests)
    assert not isinstance(raised.value, UnreachableError)
    assert (requests.attempts, raised.value.__cause__) == (1, error)


def test_an_interrupt_is_not_retried() -> None:
    requests = Requests(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        retry_request(requests)
    assert requests.attempts == 1


@pytest.mark.fault_row(44)
def test_passwords_queries_and_control_characters_are_not_displayed() -> None:
    assert shown("https://me:secret@host/a?token=secret") == "https://host/a"
    assert shown("s3://b/\x1b[2J") == r"s3://b/\x1b[2J"
