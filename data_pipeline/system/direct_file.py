"""DirectFile: writes a large file without the page cache of the operating system.

With the cache, the system copies the data into new pages, and writes them later in threads of its
own. That takes memory, and about as much CPU time as hashing the data, from the programs that
compute meanwhile (docs/experiments.md, 2026-11-24).
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

BUFFER_BYTES = 8 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has no such flag


class DirectFile:
    """A new file, written from start to end. Leaving the context without an error syncs it.

    On a file system without direct I/O, writes go through the page cache.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, flags, 0o666)
        # Direct writes need memory and sizes in whole pages. A map begins at a page.
        self._buffer = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)
        self._num_buffered = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._end_direct_writes()  # the rest is no whole page
                self._flush()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`. Raises OSError."""
        source = np.frombuffer(data, dtype=np.uint8)
        while source.size:
            target = self._buffer[self._num_buffered :][: source.size]
            np.copyto(target, source[: target.size])  # releases the GIL
            source = source[target.size :]
            self._num_buffered += target.size
            if self._num_buffered == BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        pending = self._buffer[: self._num_buffered].data
        while pending:
            pending = pending[self._write_some(pending) :]
        self._num_buffered = 0

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            # Some file systems accept the flag and refuse the write, or need other sizes.
            if error.errno != errno.EINVAL:
                raise
        self._end_direct_writes()
        return os.write(self._descriptor, data)

    def _end_direct_writes(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
