"""A limit on how much a compressed archive may expand, against archives made to fill disks."""

from data_pipeline.readers.records import BrokenStreamError
from data_pipeline.readers.source import Source

MAX_RATIO = 1000
"""Decompressed bytes per stored byte. Text has 3 to 10, very repetitive text 100."""
MIN_BYTES = 256 * 2**20
"""Archives that expand to less are always accepted."""


def require_plausible_size(num_bytes: int, source: Source) -> None:
    """Raise BrokenStreamError if `num_bytes` is implausible for the stored size of the archive."""
    stored = source.stored_bytes
    if stored and num_bytes > MIN_BYTES and num_bytes > MAX_RATIO * stored:
        raise BrokenStreamError(
            source.lines,
            0,
            f"it expands to {num_bytes:,} bytes or more, over {MAX_RATIO:,} times its "
            f"{stored:,}: refused as a decompression bomb",
        )
