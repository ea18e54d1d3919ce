"""Files of a StagedDirectory are published together or not at all, also by a killed process."""

from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError, DataError, UnfinishedError
from data_pipeline.storage import staged_directory as module
from data_pipeline.storage.atomic_files import write_synced
from data_pipeline.storage.locks import try_lock
from data_pipeline.storage.staged_directory import STAGING, StagedDirectory


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


def test_a_directory_that_is_held_is_refused(tmp_path: Path) -> None:
    with (
        StagedDirectory(tmp_path, last="last"),
        pytest.raises(DataError, match="another process is writing here"),
        StagedDirectory(tmp_path, last="last"),
    ):
        pass
    with StagedDirectory(tmp_path, last="last"):
        pass


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot be written: it is a file"),
        StagedDirectory(tmp_path / "file", last="last"),
    ):
        pass


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


def test_a_kill_while_an_earlier_set_is_replaced_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "last"]

    def publish(text: str) -> None:
        with StagedDirectory(tmp_path, last="last") as staged:
            folder = staged.stage()
            staged.keep_staging = True
            for name in names:
                write_synced(folder / name, text.encode())
            staged.publish(names)

    replace = Path.replace
    for num_moves in range(3):
        publish("first")
        moves = []

        def move(
            path: Path, target: Path, moves: list[Path] = moves, limit: int = num_moves
        ) -> Path:
            if len(moves) == limit:
                raise KeyboardInterrupt
            moves.append(target)
            return replace(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", move)
            with pytest.raises(KeyboardInterrupt):
                publish("second")
        assert not (tmp_path / "last").exists()
        with StagedDirectory(tmp_path, last="last") as staged:
            assert staged.keep_staging
            assert {name: (staged.path / name).read_text() for name in names} == dict.fromkeys(
                names, "second"
            )
            staged.publish(names)
        assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(
            names, "second"
        )


def test_the_lock_of_a_directory_that_was_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def remove_and_lock(descriptor: int) -> bool:
        out.rmdir()  # the process that had created it ends with an error
        out.mkdir()  # and another one begins
        return try_lock(descriptor)

    monkeypatch.setattr(module, "try_lock", remove_and_lock)
    with (
        pytest.raises(DataError, match="another process is writing here"),
        StagedDirectory(out, last="last"),
    ):
        pass
    assert out.is_dir()


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
    staging = tmp_path / STAGING
    staging.mkdir()
    (staging / "moving.json").write_text('["a"]')
    for name in ("a", "last"):
        (tmp_path / name).write_text(name)
    with StagedDirectory(tmp_path, last="last"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "last"]


@pytest.mark.parametrize("content", ["5", "null", "{}"])
def test_a_record_of_moved_files_that_is_not_a_list_is_ignored(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / STAGING).mkdir()
    (tmp_path / STAGING / "moving.json").write_text(content)
    with StagedDirectory(tmp_path, last="last") as staged:
        assert staged.stage().is_dir()
