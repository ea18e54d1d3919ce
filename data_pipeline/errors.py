"""Errors with a message for the user and an exit code that scripts can rely on.

    TxlError                exit code 1
    |-- ConfigError         2
    |-- DataError           3
    |   |-- UnfinishedError 3
    |   `-- UnreadableError 3
    `-- ReadFailureError    1

A message names the observed and the expected value, the place, the likely cause and the next
command. The command line prints it on standard error and exits with `exit_code`.
"""


class TxlError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 1


class ConfigError(TxlError):
    """An invalid or contradictory command line or configuration."""

    exit_code = 2


class DataError(TxlError):
    """Input text, shards or a manifest that cannot be used."""

    exit_code = 3


class ReadFailureError(TxlError):
    """A disk, network or server failed to deliver data. The data itself may be intact."""


class UnreadableError(DataError):
    """A disk, network or server did not deliver a dataset. It may be intact: repeating may help."""


class UnfinishedError(DataError):
    """The environment stopped the work (a full disk, a lost worker), not the input data.

    Finished work stays valid: running the same command again continues from it.
    """


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 rank` or `1,200 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """`3:12:44`; of days, `75:12:44`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def printable(text: str) -> str:
    """`text` with control characters escaped, safe to print on a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
