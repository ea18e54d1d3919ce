import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError, DataError, UnfinishedError
from data_pipeline.storage.atomic_files import (
    remove_leftovers,
    write_file,
    write_synced,
    write_with,
)
from data_pipeline.storage.staged_directory import STAGING, StagedDirectory


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


def test_an_error_before_publishing_leaves_nothing_not_even_the_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail() -> None:
        with StagedDirectory(out, last="last") as staged:
            write_synced(staged.stage() / "a", b"a")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not out.exists()


def test_files_killed_between_their_moves_are_taken_back_by_the_next_claim(tmp_path: Path) -> None:
    staging = tmp_path / STAGING
    staging.mkdir()
    (staging / "moving.json").write_text('["a", "b", "../victim", 3]')
    for name in ("a", "mine"):
        (tmp_path / name).write_text(name)
    victim = tmp_path.parent / "victim"
    victim.write_text("v")
    with StagedDirectory(tmp_path, last="last") as staged:
        assert sorted(path.name for path in tmp_path.iterdir()) == [STAGING, "mine"]
        assert [path.name for path in staged.stage(fresh=False).iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert victim.read_text() == "v"


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (UnfinishedError(), True),
        (KeyboardInterrupt(), True),
        (MemoryError(), True),
        (RuntimeError(), True),
        (DataError(), False),
        (ConfigError(), False),
    ],
)
def test_staged_work_outlives_all_that_says_nothing_against_it_but_no_bad_input(
    tmp_path: Path, error: BaseException, kept: bool
) -> None:
    def fail(worth_keeping: bool) -> None:
        with StagedDirectory(tmp_path / "out", last="last") as staged:
            write_synced(staged.stage() / "a", b"a")
            staged.worth_keeping = worth_keeping
            raise error

    for worth_keeping in (False, True):
        with pytest.raises(type(error)):
            fail(worth_keeping)
        assert (tmp_path / "out" / STAGING / "a").exists() == (kept and worth_keeping)
        assert (tmp_path / "out").exists() == (kept and worth_keeping)


def test_what_is_published_is_never_removed(tmp_path: Path) -> None:
    staging = tmp_path / STAGING
    staging.mkdir()
    (staging / "moving.json").write_text('["a"]')
    for name in ("a", "last"):
        (tmp_path / name).write_text(name)
    with StagedDirectory(tmp_path, last="last"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "last"]


def test_the_command_line_imports_nothing_heavy() -> None:
    program = """
import sys
import txl_dist.cli.data
heavy = {"numpy", "pydantic", "torch", "webdataset", "zstandard", "safetensors"}
sys.exit(", ".join(heavy & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, b"")
