"""How an error reaches the person who typed the command."""

import sys

from txl_dist.errors import PreemptedError, TxlError


def print_error(error: TxlError) -> None:
    """One message on standard error; a stop on request is no failure and does not read like one."""
    name = "" if isinstance(error, PreemptedError) else f"{type(error).__name__}: "
    print(f"{name}{error}", file=sys.stderr)
