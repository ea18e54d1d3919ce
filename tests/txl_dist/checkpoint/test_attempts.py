"""Only the newest attempt of a run changes its checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint import directory as module
from txl_dist.checkpoint.attempts import (
    FOLDER,
    Attempt,
    AttemptRecord,
    newest_number,
    newest_record,
)
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import FencedError, error_from_json, error_to_json


def attempt(run: Path, number: int) -> Attempt:
    record = AttemptRecord.of_this_process(number=number, launch_id="0123")
    return Attempt(record, run / FOLDER)


def test_an_older_attempt_stops_and_names_the_newer_one(tmp_path: Path) -> None:
    older, newer = attempt(tmp_path, 1), attempt(tmp_path, 2)
    older.add()
    older.require_newest()
    newer.add()
    newer.require_newest()
    with pytest.raises(FencedError) as raised:
        older.require_newest()
    assert f"{newer.record} took over this run" in str(raised.value)
    assert f"pid {os.getpid()}" in str(raised.value)
    assert raised.value.exit_code == 4
    assert isinstance(error_from_json(error_to_json(raised.value)), FencedError)


def test_of_two_starts_with_the_same_number_one_continues(tmp_path: Path) -> None:
    twins = [attempt(tmp_path, 3) for _ in range(2)]
    first, second = sorted(twins, key=lambda twin: twin.record.id)
    second.add()
    with pytest.raises(FencedError):
        first.add()
    second.require_newest()


def test_damaged_records_still_count(tmp_path: Path) -> None:
    assert newest_number(tmp_path / FOLDER) == 0
    assert newest_record(tmp_path / FOLDER) is None
    for number in (1, 9, 10):
        attempt(tmp_path, number).add()
    assert newest_number(tmp_path / FOLDER) == 10
    newest = newest_record(tmp_path / FOLDER)
    assert newest is not None
    assert newest.number == 10
    (tmp_path / FOLDER / newest.file_name).write_bytes(b"")
    assert newest_record(tmp_path / FOLDER) is None
    with pytest.raises(FencedError, match="attempt 10"):
        attempt(tmp_path, 9).require_newest()


CHANGES: dict[str, Callable[[CheckpointDirectory], object]] = {
    "open": lambda directory: directory.open(),
    "finish": lambda directory: directory.finish("0123abcd", 3),
    "latest": lambda directory: directory.set_pointer("LATEST", 1),
    "rewind": lambda directory: directory.rewind(1),
    "prune": lambda directory: directory.prune(Retention(keep=1), best_step=None),
    "score": lambda directory: directory.update_state(2, {"position": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_older_attempt_changes_nothing(change: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step=step)
    directory = CheckpointDirectory(tmp_path)
    (directory.begin("0123abcd") / "file").write_bytes(b"of a save in progress")
    directory.attempt = attempt(tmp_path, 1)
    directory.attempt.add()
    directory.require_newest_attempt()
    attempt(tmp_path, 2).add()
    before = content(tmp_path)
    with pytest.raises(FencedError):
        CHANGES[change](directory)
    assert content(tmp_path) == before


@pytest.mark.parametrize("exists", [False, True])
def test_a_checkpoint_of_an_attempt_that_was_suspended_before_the_rename_is_withdrawn(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1)
    if exists:
        save(tmp_path, step=2)
    before = content(tmp_path / "checkpoints")
    directory = CheckpointDirectory(tmp_path)
    directory.attempt = attempt(tmp_path, 1)
    staging = directory.begin("0123abcd")
    manifest = load_checkpoint_manifest(directory.at(1))
    state = {**manifest.state, "step": 2}
    changed = manifest.model_copy(update={"save_id": "0123abcd", "state": state})
    (staging / "manifest.json").write_bytes(changed.to_json())

    def publish(staged: Path, final: Path) -> Path | None:
        attempt(tmp_path, 2).add()
        return publish_directory(staged, final)

    publish_directory = module.publish_directory
    monkeypatch.setattr(module, "publish_directory", publish)
    with pytest.raises(FencedError):
        directory.finish("0123abcd", 2)
    assert content(tmp_path / "checkpoints") == before


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
