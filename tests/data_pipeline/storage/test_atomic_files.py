import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.storage.atomic_files import (
    PAGE_BYTES,
    overwrite_page,
    remove_leftovers,
    write_file,
    write_with,
)


def test_a_file_that_could_not_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_file(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("state.json", b"old")]


def test_a_page_is_overwritten_completely_also_by_a_shorter_text(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"x" * 99)
    inode = path.stat().st_ino
    for text in ("a longer text", "short", "é" * (PAGE_BYTES // 2)):
        overwrite_page(path, text)
        assert path.read_text("utf-8").rstrip(" ") == text
    assert path.stat().st_ino == inode
    with pytest.raises(ValueError, match="do not fit into a page"):
        overwrite_page(path, "é" * PAGE_BYTES)


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def test_a_file_that_a_library_made_private_follows_the_umask(tmp_path: Path, umask: int) -> None:
    def write_private(path: Path) -> None:
        path.unlink()
        os.close(os.open(path, os.O_CREAT, mode=0o600))

    write_with(tmp_path / "weights", write_private)
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o666 & ~umask


def test_leftovers_of_killed_writers_are_removed_and_no_other_files(tmp_path: Path) -> None:
    for name in ("a", ".a.17.tmp", ".a.2345.tmp", ".ab.17.tmp", ".a.17.json"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.17.json", ".ab.17.tmp", "a"]
