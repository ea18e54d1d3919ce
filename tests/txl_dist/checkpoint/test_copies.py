"""The copies of checkpoints at a URL: order, owner, retention, damage. No training is needed.

The store is moto's S3 on 127.0.0.1.
"""

# ruff: noqa: F811 - fixtures are imported, and arguments of tests

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system import sources
from data_pipeline.system.remote_path import DatasetPath, RemotePath
from tests.data_pipeline.conftest import bucket, s3_server  # noqa: F401 - fixtures
from tests.support.training_runs import tiny_spec
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.attempts import FOLDER, Attempt, AttemptRecord, newest_number
from txl_dist.checkpoint.copies import CheckpointCopies, Uploader, step_of
from txl_dist.checkpoint.directory import CheckpointDirectory, Retention
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.tensors import verify_checkpoint
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.training import resume
from txl_dist.training.resume import Resume

URL = "s3://me:CANARY@bucket/run"
REMOTE = CheckpointCopies(RemotePath("s3://bucket/run"))


@pytest.fixture(autouse=True)
def _simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between requests; no dataset and no settings to compare with the copies."""
    monkeypatch.setattr(sources, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(resume, "require_compatible", lambda *_, **__: None)


def uploader_of(run: Path, *, keep_interval_steps: int | None = None) -> Uploader:
    directory = CheckpointDirectory(run)
    number = 1 + newest_number(REMOTE.url / FOLDER)
    record = AttemptRecord.of_this_process(number=number, launch_id="0123")
    directory.attempt = Attempt(record, run / FOLDER)
    return Uploader(REMOTE, directory, Retention(keep=2, keep_interval_steps=keep_interval_steps))


@pytest.fixture
def uploader(tmp_path: Path, bucket: Any) -> Iterator[Uploader]:
    """Of one rank; the run has checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "run", step=step)
    uploader = uploader_of(tmp_path / "run")
    yield uploader
    uploader.close()


def updated(uploader: Uploader) -> list[int]:
    """Steps of the complete copies after an update."""
    uploader.update()
    assert uploader.wait(60)
    assert uploader.failure is None
    return [step_of(name) for name in REMOTE.complete()]


def download_to(directory: CheckpointDirectory) -> None:
    """What a start does on an empty disk."""
    spec = tiny_spec(Path("no-data"), directory.run, f"training.checkpoint_url={REMOTE.url}")
    resume = Resume(spec, None, None, directory)  # type: ignore[arg-type]
    resume.download_newest(newer_than=directory.newest_step())


def test_copies_follow_the_local_checkpoints(uploader: Uploader, tmp_path: Path) -> None:
    local = CheckpointDirectory(tmp_path / "run")
    assert updated(uploader) == [1, 2]
    for step in (3, 4):
        save(local.run, step=step)
    local.prune(Retention(keep=2), best_step=1)
    local.update_state(4, {"position": 99})
    assert updated(uploader) == [1, 3, 4], "1 is the best in the state of all of them"
    shutil.rmtree(local.at(4))
    save(local.run, step=4)  # trained again
    assert updated(uploader) == [1, 3, 4]

    other = CheckpointDirectory(tmp_path / "other")
    other.open()
    path = REMOTE.download(REMOTE.complete()[-1], other)
    assert verify_checkpoint(path) == verify_checkpoint(local.at(4))
    assert other.pointer("LATEST") == 4


def test_a_run_that_moved_to_an_empty_disk_keeps_its_older_copies(
    uploader: Uploader, tmp_path: Path
) -> None:
    for step in (3, 4, 5):
        save(tmp_path / "run", step=step)
    assert updated(uploader) == [1, 2, 3, 4, 5]
    new = CheckpointDirectory(tmp_path / "new")
    download_to(new)
    resumed = uploader_of(new.run, keep_interval_steps=3)
    resumed.open()
    assert updated(resumed) == [1, 3, 4, 5], "the best, a multiple of 3, the newest two"
    save(new.run, step=6)
    assert updated(resumed) == [1, 3, 5, 6]
    resumed.close()


def test_the_manifest_comes_after_all_files_and_the_end_of_a_run_is_no_failure(
    uploader: Uploader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write, has_begun, may_end = RemotePath.write_from, threading.Event(), threading.Event()

    def write_slowly(target: RemotePath, source: Path) -> None:
        has_begun.set()
        assert may_end.wait(60)
        write(target, source)

    monkeypatch.setattr(RemotePath, "write_from", write_slowly)
    uploader.update()
    assert has_begun.wait(60)
    assert REMOTE.complete() == []
    uploader.close()
    may_end.set()
    assert uploader.wait(60)
    assert REMOTE.complete() == [], "it was not completed"
    assert "not completed: the same command continues it" in caplog.text
    assert "Training continues" not in caplog.text


def test_a_slow_update_removes_nothing_of_a_checkpoint_saved_meanwhile(
    uploader: Uploader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback its step may be lower than those that the update has seen."""
    local = CheckpointDirectory(tmp_path / "run")
    save(local.run, step=4)
    upload = uploader._upload_run_files

    def save_meanwhile() -> None:
        upload()
        if local.steps() == [1, 2, 4]:
            local.rewind(2)
            save(local.run, step=3)

    monkeypatch.setattr(uploader, "_upload_run_files", save_meanwhile)
    updated(uploader)
    assert updated(uploader) == [1, 2, 3]


def set_run_id(checkpoint: DatasetPath, run_id: str) -> None:
    owned = load_checkpoint_manifest(checkpoint).model_copy(update={"run_id": run_id})
    (checkpoint / "manifest.json").write_bytes(owned.to_json())


def test_a_url_of_another_run_changes_nothing_and_keeps_its_checkpoints(
    uploader: Uploader, tmp_path: Path
) -> None:
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"1\n2\n")
    updated(uploader)
    names = REMOTE.names()
    set_run_id(REMOTE.at(names[-1]), "abc")
    REMOTE.require_run("abc")
    other = CheckpointDirectory(tmp_path / "other")
    set_run_id(save(other.run, step=1), "abd")
    (other.run / "metrics.jsonl").write_bytes(b"mine\n")
    with pytest.raises(ConfigError, match="has checkpoints of another run"):
        download_to(other)
    assert other.steps() == [1]
    assert (other.run / "metrics.jsonl").read_bytes() == b"mine\n"
    for name in names:
        (REMOTE.at(name) / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"all checkpoints at .* are damaged"):
        REMOTE.require_run("abc")
    assert REMOTE.names() == names


@pytest.mark.parametrize("file", ["weights-rank-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("change", ["damage", "remove"])
def test_a_copy_with_a_bad_file_is_left_for_an_older_one(
    uploader: Uploader, tmp_path: Path, file: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    updated(uploader)
    names = REMOTE.complete()
    spoil(REMOTE.at(names[-1]) / file, change)
    new = CheckpointDirectory(tmp_path / "new")
    download_to(new)
    assert [path.name for path in new.path.iterdir()] == ["step-00000001"], "nothing else is left"
    is_listed = (file, change) != ("manifest.json", "remove")  # without one it is no copy
    assert ("An older checkpoint is used instead" in caplog.text) == is_listed

    spoil(REMOTE.at(names[0]) / file, change)
    before = REMOTE.names()
    empty = CheckpointDirectory(tmp_path / "empty")
    if is_listed:
        with pytest.raises(CheckpointError, match=r"all checkpoints at .* are damaged"):
            download_to(empty)
    else:
        download_to(empty)
    assert empty.steps() == []
    assert REMOTE.names() == before, "nothing is removed"


def spoil(path: RemotePath, change: str) -> None:
    """Remove an object, or change one bit of it."""
    if change == "remove":
        path.remove()
        return
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


@pytest.mark.slow
@pytest.mark.parametrize("at", ["start", "update"])
def test_copies_that_a_rollback_has_abandoned_are_removed(
    uploader: Uploader, tmp_path: Path, at: str
) -> None:
    assert updated(uploader) == [1, 2]
    CheckpointDirectory(tmp_path / "run").rewind(1)
    if at == "start":
        uploader.open()
    else:
        assert updated(uploader) == [1]
    assert [step_of(name) for name in REMOTE.names()] == [1]


def test_copies_of_two_rollbacks_are_removed(uploader: Uploader, tmp_path: Path) -> None:
    """The storage does not respond between them, so no update has seen the first one."""
    local = CheckpointDirectory(tmp_path / "run")
    for _ in range(2):
        assert updated(uploader) == [1, 2]
        local.rewind(1)
        save(local.run, step=2)
    local.rewind(1)
    assert updated(uploader) == [1]
    assert [step_of(name) for name in REMOTE.names()] == [1]


@pytest.mark.slow
def test_a_failure_names_the_url_without_secrets_and_is_repaired_by_the_next_update(
    uploader: Uploader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise TimeoutError("no answer")

        patch.setattr(RemotePath, "write_from", refuse)
        uploader.update()
        assert uploader.wait(60)
    assert uploader.failure == "TimeoutError: no answer"
    remote = CheckpointCopies(RemotePath(URL))
    assert "CANARY" not in f"{remote} {remote.url} {remote.at('x')}"
    assert "upload to s3://bucket/run | TimeoutError: no answer. Training" in caplog.text
    assert updated(uploader) == [1, 2]


def test_a_complete_copy_always_has_the_metrics_up_to_its_step(
    uploader: Uploader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "run" / "metrics.jsonl"
    seen = {}
    write = RemotePath.write_bytes

    def look(target: RemotePath, content: bytes) -> None:
        if target.name == "manifest.json":
            seen[step_of(target.parent.name)] = (REMOTE.url / "metrics.jsonl").read_bytes()
        write(target, content)

    monkeypatch.setattr(RemotePath, "write_bytes", look)
    lines.write_bytes(b"1\n2\n")
    assert updated(uploader) == [1, 2]
    save(tmp_path / "run", step=3)
    lines.write_bytes(b"1\n2\n3\n")
    assert updated(uploader) == [1, 2, 3]
    assert seen == {1: b"1\n2\n", 2: b"1\n2\n", 3: b"1\n2\n3\n"}


def test_a_new_disk_gets_the_best_checkpoint_too_and_no_copy_of_it_is_lost(
    uploader: Uploader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 4):
        save(tmp_path / "run", step=step)
    old = CheckpointDirectory(tmp_path / "run")
    old.prune(Retention(keep=2), best_step=1)
    (old.run / "metrics.jsonl").write_bytes(b"1\n2\n")
    assert updated(uploader) == [1, 3, 4], "1 is the best in the state of all of them"
    new = CheckpointDirectory(tmp_path / "new")
    publish, steps = CheckpointDirectory.finish, []

    def look(directory: CheckpointDirectory, save_id: str, step: int) -> Path:
        assert (new.run / "metrics.jsonl").is_file(), "a later start would not download it"
        steps.append(step)
        return publish(directory, save_id, step)

    monkeypatch.setattr(CheckpointDirectory, "finish", look)
    download_to(new)
    assert steps == [1, 4], "the newest last: with it, the download counts as complete"
    assert verify_checkpoint(new.at(1)) == verify_checkpoint(old.at(1))
    resumed = uploader_of(new.run)
    assert updated(resumed) == [1, 3, 4]
    resumed.close()


def test_updates_that_wait_for_a_slow_store_become_one(
    uploader: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end, num_updates = threading.Event(), threading.Event(), []

    def upload_slowly() -> None:
        num_updates.append(1)
        has_begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(uploader, "_update", upload_slowly)
    uploader.update()
    assert has_begun.wait(60)
    for _ in range(5):
        uploader.update()
    may_end.set()
    assert uploader.wait(60)
    assert len(num_updates) == 2, "the one in progress, and one for all later ones"


def test_updates_that_are_overtaken_remove_old_copies_too(
    uploader: Uploader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update is always due before the copy of one checkpoint has ended."""
    local, upload, copies = CheckpointDirectory(tmp_path / "run"), uploader._upload, []

    def overtaken(step: int) -> str:
        uploader._is_due = True
        return upload(step)

    with monkeypatch.context() as patch:
        patch.setattr(uploader, "_upload", overtaken)
        for step in (3, 4, 5):
            save(local.run, step=step)
            local.prune(uploader._retention, best_step=1)
            uploader._is_due = False
            uploader._update()
            copies.append([step_of(name) for name in REMOTE.complete()])
            latest = (REMOTE.url / "LATEST").read_bytes().decode().strip()
            assert latest == f"checkpoints/{REMOTE.names()[-1]}"
    assert copies == [[3], [3, 4], [4, 5]]
    assert updated(uploader) == [1, 4, 5], "also the best"


def test_a_newest_checkpoint_that_cannot_be_read_is_no_success(
    uploader: Uploader, tmp_path: Path
) -> None:
    (CheckpointDirectory(tmp_path / "run").at(2) / "manifest.json").write_bytes(b"{}")
    reason = uploader.finish(60, retry=False)
    assert "manifest.json" in str(reason)
    assert [step_of(name) for name in REMOTE.complete()] == [1]


def test_of_two_copies_of_a_step_the_one_that_latest_names_is_taken(
    uploader: Uploader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves both after the step was trained again. LATEST names the one listed first."""
    updated(uploader)
    path = CheckpointDirectory(tmp_path / "run").at(2)
    first = newer = load_checkpoint_manifest(path).save_id
    while newer >= first:
        shutil.rmtree(path)
        newer = load_checkpoint_manifest(save(tmp_path / "run", step=2)).save_id
    monkeypatch.setattr(uploader, "_prune", lambda _: None)
    assert updated(uploader) == [1, 2, 2]
    local = CheckpointDirectory(tmp_path / "new")
    download_to(local)
    assert load_checkpoint_manifest(local.at(2)).save_id == newer


def test_the_copy_of_a_superseded_checkpoint_is_not_taken(
    uploader: Uploader, tmp_path: Path
) -> None:
    """A kill after a rollback leaves it at the URL."""
    updated(uploader)
    local = CheckpointDirectory(tmp_path / "run")
    local.rewind(1)
    download_to(local)
    assert local.steps() == [1]
