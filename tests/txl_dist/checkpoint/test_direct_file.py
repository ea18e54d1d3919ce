"""DirectFile: the bytes that were written, on file systems with and without direct I/O."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from txl_dist.checkpoint import snapshot
from txl_dist.checkpoint.snapshot import DirectFile

BUFFER_BYTES = 3 * 4096
CONTENT = bytes(range(256)) * 256


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BUFFER_BYTES", BUFFER_BYTES)


def write(path: Path, *sizes: int) -> bytes:
    """Write blocks of these sizes; returns what was written."""
    end = 0
    with DirectFile(path) as file:
        for size in sizes:
            file.write(memoryview(CONTENT)[end : end + size])
            end += size
    return CONTENT[:end]


SIZES = (
    (), (0,), (1,), (4096,), (BUFFER_BYTES,), (BUFFER_BYTES - 1, 1), (BUFFER_BYTES + 1,),
    (8, 3 * BUFFER_BYTES, 5), (5 * BUFFER_BYTES + 77,),
)  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_the_file_has_what_was_written(tmp_path: Path, sizes: tuple[int, ...], folder: str) -> None:
    path = tmp_path / "file" if folder == "disk" else Path(f"/dev/shm/txl-test-{os.getpid()}")
    try:
        path.write_bytes(b"longer than the new content" * 10_000)
        assert write(path, *sizes) == path.read_bytes()
    finally:
        path.unlink()


def refuse_direct(function: Callable[..., Any], flags_of: Callable[..., int]) -> Any:
    """`function`, but with EINVAL where it would use direct I/O, as some file systems have it."""

    def call(*arguments: Any) -> Any:
        if flags_of(*arguments) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return function(*arguments)

    return call


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    if refused == "open":
        monkeypatch.setattr(os, "open", refuse_direct(os.open, lambda path, flags, mode: flags))
    else:
        flags_of = lambda descriptor, data: fcntl.fcntl(descriptor, fcntl.F_GETFL)  # noqa: E731
        monkeypatch.setattr(os, "write", refuse_direct(os.write, flags_of))
    assert write(tmp_path / "file", 8, 3 * BUFFER_BYTES, 5) == (tmp_path / "file").read_bytes()


def test_whole_buffers_are_written_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O")
    written, original = [], os.write

    def recorded(descriptor: int, data: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        written.append((len(data), is_direct))
        return original(descriptor, data)

    monkeypatch.setattr(os, "write", recorded)
    write(tmp_path / "file", 2 * BUFFER_BYTES + 5)
    assert written == [(BUFFER_BYTES, True), (BUFFER_BYTES, True), (5, False)]


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", BUFFER_BYTES)
