"""The frame cache: entries, eviction, and files that it must never touch."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError
from data_pipeline.shards.shard_files import FrameCache

SHARD = "ab" * 32


def test_an_entry_can_be_read_until_it_is_dropped(tmp_path: Path) -> None:
    cache = FrameCache(tmp_path / "made", 10**6)
    assert cache.get(SHARD, 0, 3) is None
    cache.put(SHARD, 0, b"abc")
    assert cache.get(SHARD, 0, 3) == b"abc"
    assert cache.get("cd" * 32, 0, 3) is cache.get(SHARD, 1, 3) is cache.get(SHARD, 0, 4) is None
    cache.drop(SHARD, 0, 3)
    assert cache.get(SHARD, 0, 3) is None


def test_least_recently_used_entries_are_evicted_first_and_the_limit_holds(tmp_path: Path) -> None:
    cache = FrameCache(tmp_path, 1000)
    for number in range(9):
        cache.put(SHARD, number, bytes(100))
        os.utime(tmp_path / f"txl-frame-{SHARD}-{number}-100", (number, number))
    assert cache.get(SHARD, 0, 100)  # marks it as used most recently
    for number in range(9, 12):
        cache.put(SHARD, number, bytes(100))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert cache.get(SHARD, 0, 100)
    assert cache.get(SHARD, 1, 100) is None
    assert cache.get(SHARD, 11, 100)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 400), min_size=5, max_size=20),
    linked=st.booleans(),
)
def test_no_file_of_another_name_is_removed_or_changed(
    data: st.DataObject, sizes: list[int], linked: bool
) -> None:
    """Sources above the cache's directory, in it, below it, and behind links of every name."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        home = top / "home"
        (home / "below").mkdir(parents=True)
        if linked:
            (top / "link").symlink_to(home)
        cache = FrameCache(top / "link" if linked else home, 600)
        names = ["train-000000.tar.zst", "manifest.json", f"txl-frame-{SHARD}-0-9.bak"]
        names += [f"xtxl-frame-{SHARD}-0-9", f"txl-frame-{SHARD[:-1]}-0-9", "txl-frame-"]
        sources = [place / name for place in (top, home, home / "below") for name in names]
        sources += [place / f"txl-frame-{SHARD}-7-300" for place in (top, home / "below")]
        for path in sources:
            path.write_bytes(bytes(300))
            os.utime(path, (1, 1))
        for number, size in enumerate(sizes):
            target = data.draw(st.sampled_from(sources))
            name = f"txl-frame-{SHARD}-{number}-{size}"
            aside = f"{name}.{os.getpid()}.{threading.get_ident()}.tmp"
            for link in (name, aside):
                if data.draw(st.booleans()):
                    (home / link).symlink_to(target)
            cache.put(SHARD, number, b"x" * size)
            cache.drop(SHARD, data.draw(st.integers(0, number)), size)
        assert all(path.read_bytes() == bytes(300) for path in sources)


def test_a_directory_or_fifo_with_an_entrys_name_is_ignored(tmp_path: Path) -> None:
    cache = FrameCache(tmp_path, 200)
    os.mkfifo(tmp_path / f"txl-frame-{SHARD}-0-100")
    (tmp_path / f"txl-frame-{SHARD}-1-100").mkdir()
    assert cache.get(SHARD, 0, 100) is cache.get(SHARD, 1, 100) is None
    cache.put(SHARD, 1, bytes(100))
    cache.drop(SHARD, 1, 100)
    cache.put(SHARD, 2, bytes(100))
    assert cache.get(SHARD, 2, 100)


def test_processes_share_one_directory(tmp_path: Path) -> None:
    """Three write, read and evict at the same time; every entry that is read is complete."""
    code = f"""
from pathlib import Path
from data_pipeline.shards.shard_files import FrameCache
cache = FrameCache(Path({str(tmp_path)!r}), 40_000)
for turn in range(400):
    first = turn * 7 % 50
    data = cache.get({SHARD!r}, first, 1000 + first)
    assert data in (None, bytes([first]) * (1000 + first))
    if data is None:
        cache.put({SHARD!r}, first, bytes([first]) * (1000 + first))
"""
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", code]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 40_000


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
