"""Errors for people: each carries the exit code that scripts rely on.

A message says what was found and where, what was expected, the likely cause and the next command.
The command line prints it on standard error and exits with `exit_code`; nothing else calls exit.
"""


class TxlError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 1


class ConfigError(TxlError):
    """A command line or configuration that cannot be meant."""

    exit_code = 2


class DataError(TxlError):
    """Input text, shards or a manifest that must not be trusted or used."""

    exit_code = 3


class UnreadError(TxlError):
    """Data that could not be read now, by a disk, a network or a server: it may be sound."""


class UnfinishedError(DataError):
    """Work that its surroundings stopped (a full disk, a lost worker), not what it works on.

    What was finished before stays good: the same command goes on from it.
    """


def printable(text: str) -> str:
    """`text` with control characters escaped: safe to show on a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
