"""URLs: supported schemes, display without secrets, and requests to object stores with retries."""

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from data_pipeline.errors import ConfigError, printable
from data_pipeline.storage.source_errors import SourceError, UnreachableError

SCHEMES = ("file", "s3", "gs", "http", "https")
_EXTRAS = {"s3": "s3", "gs": "gcs", "http": "http", "https": "http"}
_MAX_ATTEMPTS = 3
_S3_ATTEMPTS = 2
_FIRST_WAIT_SECONDS = 0.5
_T = TypeVar("_T")


def is_url(address: str) -> bool:
    """Whether `address` is a URL of any scheme, not a path."""
    scheme, separator, _ = address.partition("://")
    return bool(separator) and "/" not in scheme


def scheme_of(address: str) -> str:
    """The scheme of a URL, "" for a local path. Raises ConfigError for an unsupported scheme."""
    if not is_url(address):
        return ""
    scheme = address.partition("://")[0]
    if scheme.lower() not in SCHEMES:
        raise ConfigError(
            f"{shown(address)}: URLs of scheme {printable(scheme)!r} are not supported; valid are "
            f"{', '.join(SCHEMES)}, and paths. Copy the data to one of these."
        )
    return scheme.lower()


def local_path(address: str) -> str | None:
    """The path of a local address or a file:// URL; None for any other URL."""
    scheme = scheme_of(address)
    if scheme == "file":
        path = address.partition("://")[2]
        if not path.startswith("/"):
            raise ConfigError(f"{shown(address)}: write file:// and an absolute path: file:///a/b")
        return path
    return None if scheme else address


def shown(path: str) -> str:
    """A path or URL for a message: without password and query, control characters escaped."""
    if "://" in path:
        path = re.sub(r"://[^/@]*@", "://", path).partition("?")[0]
    return printable(path)


def file_system(url: str) -> Any:
    """fsspec's file system for a URL. Raises ConfigError with the extra that must be installed."""
    import fsspec

    scheme = scheme_of(url)
    try:
        system = fsspec.filesystem(scheme)
    except ImportError as error:
        raise ConfigError(
            f"{shown(url)}: reading {scheme}:// needs a package that is not installed ({error}). "
            f"Install it: pip install 'txl-dist[{_EXTRAS[scheme]}]'"
        ) from error
    if scheme == "s3":
        # s3fs repeats what botocore has repeated, with 15 s per attempt: a store that accepts
        # connections and never responds took 20 minutes to be reported.
        system.retries = min(system.retries, _S3_ATTEMPTS)
    return system


def retry_request(request: Callable[[], _T]) -> _T:
    """The result of a request to an object store, after at most `_MAX_ATTEMPTS` attempts.

    The waits between attempts double. Raises SourceError for a missing or forbidden object, without
    a retry, and UnreachableError when the last attempt fails.
    """
    # A loop, not the package tenacity: with it this function is longer, and the import takes 40 ms.
    for attempt in range(_MAX_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        try:
            return request()
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise SourceError(f"cannot be read: {type(error).__name__}") from error
        except Exception as error:  # every client library has its own error classes
            last_error = error
    reason = printable(_without_urls(str(last_error)))[:200] or type(last_error).__name__
    message = f"cannot be read after {_MAX_ATTEMPTS} attempts: {reason}"
    raise UnreachableError(message) from last_error


def _without_urls(text: str) -> str:
    return re.sub(r"\w+://\S+", lambda url: shown(url[0]), text)
