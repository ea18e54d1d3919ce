"""The frame cache: entries, eviction, and files that it must never touch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.shards.shard_files import FrameCache

SHA256 = "ab" * 32
SIZE = 100


def entry(number: int) -> bytes:
    return bytes([number]) * SIZE


class Shard:
    """A file of entries that are read through a cache."""

    def __init__(self, folder: Path, cache: FrameCache) -> None:
        self.path, self.cache = folder / "shard", cache
        self.path.write_bytes(b"".join(map(entry, range(50))))

    def read(self, number: int) -> bytes:
        def check(data: bytes) -> bytes:
            if data != entry(number):
                raise DataError("damaged")
            return data

        return self.cache.read(self.path, number * SIZE, SIZE, sha256=SHA256, check=check)

    def entry_path(self, number: int) -> Path:
        return self.cache.directory / f"txl-frame-{SHA256}-{number * SIZE}-{SIZE}"


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, FrameCache(tmp_path / "cache", 12 * SIZE))


def test_a_second_read_needs_no_shard_unless_the_entry_is_damaged(shard: Shard) -> None:
    assert shard.read(1) == entry(1)
    shard.entry_path(1).write_bytes(bytes(SIZE))
    assert shard.read(1) == shard.entry_path(1).read_bytes() == entry(1)
    shard.path.unlink()
    assert shard.read(1) == entry(1)
    with pytest.raises(DataError, match=r"shard .*cannot be read"):
        shard.read(2)


def test_a_cache_of_no_bytes_does_not_read_entries_of_an_earlier_run(shard: Shard) -> None:
    shard.read(1)
    off = Shard(shard.path.parent, FrameCache(shard.cache.directory, 0))
    assert off.read(2) == entry(2)
    assert not off.entry_path(2).exists()
    off.path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        off.read(1)


def test_least_recently_used_entries_are_evicted_first_and_the_limit_holds(shard: Shard) -> None:
    for number in range(9):
        shard.read(number)
        os.utime(shard.entry_path(number), (number, number))
    shard.read(0)  # marks it as used most recently
    for number in range(9, 12):
        shard.read(number)
        sizes = [path.stat().st_size for path in shard.cache.directory.iterdir()]
        assert sum(sizes) <= shard.cache.limit_bytes
    assert [shard.entry_path(number).exists() for number in (0, 1, 11)] == [True, False, True]


def test_no_other_file_is_removed_or_changed(shard: Shard) -> None:
    folder = shard.cache.directory
    (folder / "below").mkdir(parents=True)
    names = ["manifest.json", f"xtxl-frame-{SHA256}-0-9", f"below/txl-frame-{SHA256}-0-9"]
    others = [folder / name for name in names]
    for path in others:
        path.write_bytes(bytes(300))
        os.utime(path, (1, 1))
    shard.entry_path(3).symlink_to(others[0])
    for number in range(40):
        shard.read(number)
    assert all(path.read_bytes() == bytes(300) for path in others)


def test_a_directory_or_fifo_with_an_entrys_name_is_ignored(shard: Shard) -> None:
    shard.entry_path(0).mkdir(parents=True)
    os.mkfifo(shard.entry_path(1))
    for number in range(12):
        assert shard.read(number) == entry(number)


def test_a_disk_without_room_for_the_cache_stops_no_reader(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shard = Shard(tmp_path, FrameCache(tmp_path / "file" / "cache", 10**8))
    assert shard.read(7) == entry(7)


def test_processes_share_one_directory(tmp_path: Path) -> None:
    """Three write, read and evict at the same time; every entry that is read is complete."""
    code = f"""
from pathlib import Path
from data_pipeline.shards.shard_files import FrameCache
from tests.data_pipeline.shards.test_shard_files import Shard, entry
folder = Path({str(tmp_path)!r})
cache = FrameCache(folder / "cache", 1000)
(folder / str(id(cache))).mkdir()
shard = Shard(folder / str(id(cache)), cache)
for turn in range(400):
    assert shard.read(turn * 7 % 50) == entry(turn * 7 % 50)
"""
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", code]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    left = [*(tmp_path / "cache").iterdir()]
    assert not [path for path in left if path.suffix == ".tmp"]
    assert sum(path.stat().st_size for path in left) <= 1000


def test_size_and_directory_are_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TXL_CACHE_BYTES", "12")
    cache = FrameCache.of_user()
    assert (cache.directory, cache.limit_bytes) == (tmp_path, 12)
    monkeypatch.setenv("TXL_CACHE_BYTES", "10G")
    with pytest.raises(ConfigError, match="TXL_CACHE_BYTES='10G' must be a number of bytes"):
        FrameCache.of_user()
    monkeypatch.delenv("TXL_CACHE_BYTES")
    monkeypatch.delenv("TXL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FrameCache.of_user().directory == tmp_path / "txl" / "frames"
    assert FrameCache.of_user().limit_bytes == 10 * 2**30
