"""Files and directories: atomic writes, publication in one step, locks released by the kernel."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import ConfigError, DataError, UnfinishedError, UnreadableError
from data_pipeline.system import files
from data_pipeline.system.files import (
    PAGE_BYTES,
    STAGING,
    StagedDirectory,
    is_locked,
    overwrite_page,
    publish_directory,
    remove_directory,
    remove_leftovers,
    try_lock,
    wait_for_lock,
    write_file,
    write_synced,
)

HOLDER = """
import os, sys, time
from data_pipeline.system.files import try_lock
assert try_lock(os.open(sys.argv[1], os.O_RDONLY))
print("locked", flush=True)
time.sleep(600)
"""


def fail(_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_could_not_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left") as raised:
        write_file(path, b"new")
    assert raised.value.filename == str(path)
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


def test_the_error_of_a_write_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", fail)
    for path in (tmp_path / "a.yaml", tmp_path / "missing" / "b.yaml"):
        with pytest.raises(OSError) as raised:  # noqa: PT011 - its file is what is tested
            write_synced(path, b"new")
        assert raised.value.filename == str(path)
    with pytest.raises(OSError) as raised:  # noqa: PT011
        write_synced(tmp_path / "copy", (path.read_bytes() for path in [tmp_path / "source"]))
    assert raised.value.filename == str(tmp_path / "source"), "what is written cannot be read"


def test_leftovers_of_killed_writers_are_removed_and_no_other_files(tmp_path: Path) -> None:
    for name in ("a", ".a.17.tmp", ".a.2345.tmp", ".ab.17.tmp", ".a.17.json"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.17.json", ".ab.17.tmp", "a"]


@pytest.fixture(params=["file", "directory"])
def descriptors(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two open descriptors of one file or directory, as two processes would have."""
    path = tmp_path / "locked"
    if request.param == "directory":
        path.mkdir()
    else:
        path.touch()
    pair = (os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY))
    yield pair
    for descriptor in pair:
        os.close(descriptor)


def test_only_one_descriptor_holds_the_lock(descriptors: tuple[int, int]) -> None:
    first, second = descriptors
    assert try_lock(first)
    assert not try_lock(second)
    assert try_lock(first), "the holder may take it again"
    assert not wait_for_lock(second, timeout_seconds=0.2)


def test_a_lock_can_be_seen_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path), "no file"
    with path.open("wb") as first, path.open("wb") as second:
        assert not is_locked(path)
        assert try_lock(first.fileno())
        assert is_locked(path)
        assert not try_lock(second.fileno()), "still held"


def test_waiting_ends_when_the_lock_is_released(descriptors: tuple[int, int]) -> None:
    first, second = descriptors
    assert try_lock(first)
    timer = threading.Timer(0.2, fcntl.flock, (first, fcntl.LOCK_UN))
    timer.start()
    assert wait_for_lock(second, timeout_seconds=30)
    timer.join()


@pytest.mark.fault_row(35)
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert not try_lock(descriptor)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert try_lock(descriptor)
    os.close(descriptor)


def test_a_file_system_without_locks_counts_as_unlocked(
    descriptors: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert try_lock(descriptors[0])
    assert not try_lock(descriptors[0], if_unsupported=False)


def directory_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_publishing_replaces_a_directory_and_returns_its_hidden_name(tmp_path: Path) -> None:
    final = tmp_path / "final"
    assert publish_directory(directory_with(tmp_path / ".new.tmp", "first"), final) is None
    replaced = publish_directory(directory_with(tmp_path / ".new.tmp", "second"), final)
    assert (final / "file").read_text() == "second"
    assert replaced is not None
    assert replaced.name.startswith(".final.")
    assert replaced.name.endswith(".tmp")
    remove_directory(replaced)
    assert list(tmp_path.iterdir()) == [final]


def test_a_directory_without_replacement_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the new one at the last moment."""
    final = directory_with(tmp_path / "final", "first")
    staged = directory_with(tmp_path / ".new.tmp", "second")
    monkeypatch.setattr(files, "fsync_directory", shutil.rmtree)
    with pytest.raises(FileNotFoundError):
        publish_directory(staged, final)
    assert (final / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


def test_a_removal_that_fails_leaves_only_a_hidden_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path, *_: Any) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    path = directory_with(tmp_path / "final", "text")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(OSError, match="busy"):
            remove_directory(path)
        (hidden,) = tmp_path.iterdir()
        with pytest.raises(OSError, match="busy"):
            remove_directory(hidden)
    (hidden,) = tmp_path.iterdir()
    assert hidden.name.count(".") == 3, "the name does not grow with each attempt"
    remove_directory(hidden)
    assert not list(tmp_path.iterdir())


def test_published_files_are_moved_and_the_rest_of_the_staging_folder_is_removed(
    tmp_path: Path,
) -> None:
    with StagedDirectory(tmp_path / "out", last="last") as staged:
        folder = staged.stage()
        for name in ("a", "last", "scratch"):
            write_synced(folder / name, name.encode())
        with pytest.raises(ValueError, match="publish needs last"):
            staged.publish(["a"])
        staged.publish(["a", "last"])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["a", "last"]


def enter(path: Path) -> None:
    with StagedDirectory(path, last="last"):
        pass


def test_a_directory_that_is_held_is_refused_and_so_is_a_file(tmp_path: Path) -> None:
    with (
        StagedDirectory(tmp_path, last="last"),
        pytest.raises(DataError, match="another process is writing here"),
    ):
        enter(tmp_path)
    enter(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: it is a file"):
        enter(tmp_path / "file")


NAMES = ["a", "b", "last"]


def publish(directory: Path, text: str, *, killed_at_move: int | None = None) -> None:
    """Publish files of this text, or end before a move as if the process was killed there."""
    replace, moves = Path.replace, iter(range(9))

    def move(path: Path, target: Path) -> Path:
        if next(moves) == killed_at_move:
            raise KeyboardInterrupt
        return replace(path, target)

    with StagedDirectory(directory, last="last") as staged, pytest.MonkeyPatch.context() as patch:
        folder = staged.stage()
        staged.keep_staging = True
        for name in NAMES:
            write_synced(folder / name, text.encode())
        patch.setattr(Path, "replace", move)
        staged.publish(NAMES)


def texts_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("num_moves", range(3))
def test_a_kill_while_an_earlier_set_is_replaced_leaves_no_mixture(
    tmp_path: Path, num_moves: int
) -> None:
    publish(tmp_path, "first")
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, "second", killed_at_move=num_moves)
    assert not (tmp_path / "last").exists()
    with StagedDirectory(tmp_path, last="last") as staged:
        assert staged.keep_staging
        assert dict.fromkeys(NAMES, "second").items() <= texts_in(staged.path).items()
        staged.publish(NAMES)
    assert texts_in(tmp_path) == dict.fromkeys(NAMES, "second")


@pytest.mark.parametrize("num_moves", range(3))
@pytest.mark.parametrize("names", [["last", "b", "a"], ["a", "b"], []])
def test_after_a_kill_what_somebody_else_puts_into_the_directory_stays(
    tmp_path: Path, num_moves: int, names: list[str]
) -> None:
    """A set that is complete, one that is still being copied, and nothing (`rm *`)."""
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, "killed", killed_at_move=num_moves)
    for name in NAMES:
        (tmp_path / name).unlink(missing_ok=True)
    for name in names:
        (tmp_path / name).write_text("another set")

    def be_refused() -> None:
        with StagedDirectory(tmp_path, last="last"):
            raise DataError

    with pytest.raises(DataError):
        be_refused()
    assert texts_in(tmp_path) == dict.fromkeys(names, "another set")


def test_the_lock_of_a_directory_that_was_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def remove_and_lock(descriptor: int) -> bool:
        out.rmdir()  # the process that had created it ends with an error
        out.mkdir()  # and another one begins
        return try_lock(descriptor)

    monkeypatch.setattr(files, "try_lock", remove_and_lock)
    with pytest.raises(DataError, match="another process is writing here"):
        enter(out)
    assert out.is_dir()


@pytest.mark.parametrize(
    "error",
    [
        UnfinishedError(), UnreadableError(), KeyboardInterrupt(), MemoryError(), RuntimeError(),
        DataError(), ConfigError(),
    ],
)  # fmt: skip
def test_staged_work_outlives_all_that_says_nothing_against_it_but_no_bad_input(
    tmp_path: Path, error: BaseException
) -> None:
    kept = type(error) not in (DataError, ConfigError)

    def fail(keep_staging: bool) -> None:
        with StagedDirectory(tmp_path / "out", last="last") as staged:
            write_synced(staged.stage() / "a", b"a")
            staged.keep_staging = keep_staging
            raise error

    for keep_staging in (False, True):
        with pytest.raises(type(error)):
            fail(keep_staging)
        assert (tmp_path / "out" / STAGING / "a").exists() == (kept and keep_staging)
        assert (tmp_path / "out").exists() == (kept and keep_staging)


def test_what_is_published_is_never_removed(tmp_path: Path) -> None:
    """Killed after the last file was moved."""
    (tmp_path / STAGING / "units").mkdir(parents=True)
    for name in ("a", "last"):
        (tmp_path / name).write_text(name)
    enter(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "last"]
