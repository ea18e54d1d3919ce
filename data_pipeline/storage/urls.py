"""URLs: which schemes are read, how a URL is shown, and requests to object stores with retries."""

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from data_pipeline.errors import ConfigError, printable
from data_pipeline.storage.source_errors import SourceError, UnreachableError

SCHEMES = ("file", "s3", "gs", "http", "https")
_EXTRAS = {"s3": "s3", "gs": "gcs", "http": "http", "https": "http"}
_ATTEMPTS, _FIRST_WAIT_SECONDS = 3, 0.5
_T = TypeVar("_T")


def is_url(given: str) -> bool:
    """Whether `given` is a URL of any scheme, and no path."""
    scheme, mark, _ = given.partition("://")
    return bool(mark) and "/" not in scheme


def scheme_of(given: str) -> str:
    """The scheme of a URL, "" for a local path; ConfigError for one that is not read here."""
    if not is_url(given):
        return ""
    scheme = given.partition("://")[0]
    if scheme.lower() not in SCHEMES:
        raise ConfigError(
            f"{shown(given)}: URLs of scheme {printable(scheme)!r} are not read; legal are "
            f"{', '.join(SCHEMES)}, and paths. Copy the data here or to one of these."
        )
    return scheme.lower()


def local_path(given: str) -> str | None:
    """The local path that `given` is or names by file://, or None for any other URL."""
    scheme = scheme_of(given)
    if scheme == "file":
        path = given.partition("://")[2]
        if not path.startswith("/"):
            raise ConfigError(f"{shown(given)}: write file:// and an absolute path, file:///a/b.")
        return path
    return None if scheme else given


def shown(path: str) -> str:
    """A path or URL for a message: without password, query and control characters."""
    if "://" in path:
        path = re.sub(r"://[^/@]*@", "://", path).partition("?")[0]
    return printable(path)


def file_system(url: str) -> Any:
    """fsspec's file system for a URL; ConfigError names the extra that is not installed."""
    import fsspec

    scheme = scheme_of(url)
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise ConfigError(
            f"{shown(url)}: reading {scheme}:// needs a package that is not installed ({error}). "
            f"Install it: pip install 'txl-dist[{_EXTRAS[scheme]}]'"
        ) from error


def attempt(call: Callable[[], _T]) -> _T:
    """What `call` to an object store returns, tried again a few times; OSError if it fails."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return call()
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise SourceError(f"cannot be read: {type(error).__name__}") from error
        except Exception as error:  # each store has errors of its own, from libraries of its own
            if not left:
                reason = printable(_without_urls(str(error)))[:200] or type(error).__name__
                tried = f"cannot be read after {_ATTEMPTS} attempts"
                raise UnreachableError(f"{tried}: {reason}") from error
            time.sleep(_FIRST_WAIT_SECONDS * 2 ** (_ATTEMPTS - 1 - left))
    raise AssertionError("unreachable")


def _without_urls(text: str) -> str:
    return re.sub(r"\w+://\S+", lambda found: shown(found[0]), text)
