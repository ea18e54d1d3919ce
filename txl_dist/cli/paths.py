"""Options that take a path on this machine refuse URLs.

pathlib reads `s3://bucket/x` as the folder `s3:/bucket/x` below the working directory: what a
command writes there looks complete and is gone with the machine.
"""

from collections.abc import Callable
from pathlib import Path

from data_pipeline.errors import ConfigError

FETCH = "Copy it to this machine with the tools of its store, and give the copy's path."
SEND = "Give a local directory, and copy that there with the tools of its store."


def require_local(given: str, advice: str = FETCH) -> str:
    """`given` itself; ConfigError if it is a URL, which `advice` has as `{url}`."""
    from data_pipeline.storage.urls import is_url, shown

    if is_url(given):
        if given.lower().startswith("file:///"):
            advice = f"Write {shown(given)[len('file://') :]}."
        raise ConfigError(
            f"{shown(given)}: a path on this machine is wanted here, not a URL. "
            + advice.replace("{url}", shown(given))
        )
    return given


def local_path_parser(advice: str = FETCH) -> Callable[[str], Path]:
    """What typer is to make of an option's text (`parser=`)."""

    def path(given: str) -> Path:  # by this name --help shows PATH
        return Path(require_local(given, advice))

    return path
