"""How the command line shows an error."""

import sys
from contextlib import suppress

from txl_dist.errors import PreemptedError, TxlError


def print_error(error: TxlError) -> None:
    """Print one message on standard error."""
    # A stop on request is not a failure, so its message has no error name in front.
    name = "" if isinstance(error, PreemptedError) else f"{type(error).__name__}: "
    with suppress(OSError):  # the terminal is gone; the exit code still tells
        print(f"{name}{error}", file=sys.stderr, flush=True)
