"""Preparing: the same bytes always, whatever happened before; splits and shuffles that stay put."""

import fcntl
import gzip
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.shards.inspection import excerpts
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.verify import verify_dataset

Txl = Callable[..., Any]
SETTINGS = PrepareSettings(
    split={"valid": 0.2, "test": 0.2}, shuffle=3, shard_bytes=12_000, block_bytes=2_000
)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def ids_of(directory: Path) -> dict[str, list[str]]:
    """Per split, its documents' ids in order."""
    found: dict[str, list[str]] = {}
    for excerpt in excerpts(directory, documents=10**6):
        found.setdefault(excerpt.split, []).append(excerpt.document_id)
    return found


def test_the_same_input_and_settings_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare_dataset([corpus], tmp_path / "one", SETTINGS)
    elsewhere = tmp_path / "moved" / "corpus"
    shutil.copytree(corpus, elsewhere)
    for number, path in enumerate(sorted(elsewhere.rglob("*.txt"), reverse=True)):
        os.utime(path, (number, number))
    prepare_dataset([elsewhere], tmp_path / "two", SETTINGS)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_no_path_of_this_machine_is_in_the_dataset(corpus: Path, tmp_path: Path) -> None:
    prepare_dataset([corpus], tmp_path / "out", PrepareSettings())
    assert not any(bytes(tmp_path) in content for content in files_of(tmp_path / "out").values())


def test_a_second_run_finds_the_dataset_complete(txl: Txl, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = txl("prepare", corpus, "--out", out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    second = txl("prepare", corpus, "--out", out)
    assert (first.code, second.code) == (0, 0)
    assert "already complete" not in first.out
    assert "already complete" in second.out
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}


def test_another_dataset_in_the_way_is_refused_with_what_differs(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert txl("prepare", corpus, "--out", out, "--shuffle", "1").code == 0
    before = files_of(out)
    ended = txl("prepare", corpus, "--out", out, "--shuffle", "2", "--split", "valid=0.5")
    assert ended.code == 3
    assert "shuffle: 1 there, 2 now" in ended.err
    assert "split: {} there, {'valid': 0.5} now" in ended.err
    (corpus / "00.txt").write_text("other")
    ended = txl("prepare", corpus, "--out", out, "--shuffle", "1")
    assert ended.code == 3
    assert "input digest" in ended.err
    assert files_of(out) == before


def test_foreign_files_in_the_way_are_refused_and_left_alone(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    for name in ("notes.md", "train-000000.tar.zst", "rejects.jsonl"):
        out = tmp_path / f"out-{name}"
        out.mkdir()
        (out / name).write_text("mine")
        ended = txl("prepare", corpus, "--out", out)
        assert ended.code == 3
        assert name in ended.err
        assert files_of(out) == {name: b"mine"}


def test_a_dataset_that_lost_a_shard_is_not_called_complete(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert txl("prepare", corpus, "--out", out).code == 0
    (out / "train-000000.tar.zst").unlink()
    ended = txl("prepare", corpus, "--out", out)
    assert ended.code == 3
    assert "not train-000000.tar.zst" in ended.err


def test_a_second_writer_is_refused_while_the_first_writes(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    ended = txl("prepare", corpus, "--out", out)
    os.close(held)
    assert ended.code == 3
    assert "another process is writing" in ended.err
    assert txl("prepare", corpus, "--out", out).code == 0


def test_a_full_disk_is_explained_and_leaves_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="the disk is full while writing shards"):
        prepare_dataset([corpus], out, SETTINGS)
    assert not out.exists()


def test_a_file_that_changes_between_the_passes_is_refused(corpus: Path, tmp_path: Path) -> None:
    def change(what: str, done: int, total: int) -> None:
        if what == "writing":
            (corpus / "sub" / "09.txt").write_text("rewritten")
            (corpus / "10.txt").write_text("rewritten")

    with pytest.raises(DataError, match="changed while it was being read"):
        prepare_dataset([corpus], tmp_path / "out", SETTINGS, progress=change)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fails_on_the_second_reading_is_named_and_costs_no_finished_work(
    corpus: Path, tmp_path: Path
) -> None:
    path, aside, out = corpus / "10.txt", tmp_path / "aside", tmp_path / "out"

    def fail(what: str, done: int, total: int) -> None:
        if what == "writing" and not done:
            path.rename(aside)
            path.symlink_to("/proc/self/mem")  # reading there is an EIO

    with pytest.raises(UnfinishedError, match=r"10\.txt cannot be read again: Input/output error"):
        prepare_dataset([corpus], out, SETTINGS, progress=fail)
    path.unlink()
    aside.rename(path)
    assert prepare_dataset([corpus], out, SETTINGS).reused_units


@pytest.mark.parametrize("damage", ["cut", "replaced", "gone", "failing"])
def test_a_spill_file_that_is_lost_is_not_blamed_on_the_input(
    corpus: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    for path in corpus.rglob("*.txt"):
        path.with_suffix(".txt.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()

    def lose(what: str, done: int, total: int) -> None:
        if what == "writing" and not done:
            (spill,) = out.glob(".staging.tmp/units/spill-??????")
            size = spill.stat().st_size
            spill.unlink()
            if damage == "failing":
                spill.symlink_to("/proc/self/mem")
            elif damage != "gone":
                spill.write_bytes(b"x" * (size if damage == "replaced" else 10))

    with pytest.raises(UnfinishedError, match="spill-000000 cannot be read again"):
        prepare_dataset([corpus], out, SETTINGS, progress=lose)
    prepare_dataset([corpus], out, SETTINGS)  # its scan is done again


TWO_SHARDS = PrepareSettings(split={"valid": 0.2}, shuffle=3, block_bytes=2_000)
"""Every kind of file operation, and each as seldom as can be: the test kills at every one."""


def run_and_kill_at(event: int, corpus: Path, out: Path) -> bool:
    """Prepare in a child that SIGKILLs itself at its n-th file operation; whether it got there."""
    child = os.fork()
    if child == 0:
        left = event

        def kill(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                left -= str(out) in os.fsdecode(str(arguments[0]))
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            prepare_dataset([corpus], out, TWO_SHARDS)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_after_a_kill_at_any_file_operation_a_rerun_gives_the_same_bytes(
    corpus: Path, tmp_path: Path
) -> None:
    prepare_dataset([corpus], tmp_path / "whole", TWO_SHARDS)
    whole = files_of(tmp_path / "whole")
    out = tmp_path / "out"
    event, published, reused = 0, 0, 0
    while run_and_kill_at(event := event + 1, corpus, out):
        if (out / "manifest.json").exists():
            assert verify_dataset(out).problems == []
            published += 1
        reused += prepare_dataset([corpus], out, TWO_SHARDS).reused_units > 0
        assert files_of(out) == whole
        shutil.rmtree(out)
    assert event > 30
    assert published
    assert reused > event // 2


def test_a_killed_command_leaves_no_dataset_and_its_rerun_a_whole_one(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    """Through the real program, killed while it writes, then with other settings."""
    out = tmp_path / "out"
    program = """
import os, signal, sys
def kill(name, arguments):
    if name == "os.rename" and "index.safetensors" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
from txl_dist.cli.app import main
main()
"""
    arguments = ["prepare", corpus, "--out", out, "--shuffle", "1"]
    killed = subprocess.run([sys.executable, "-c", program, *arguments], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    assert txl("data", "verify", out).code == 3
    assert txl("prepare", corpus, "--out", out, "--shuffle", "2").code == 0
    assert txl("prepare", corpus, "--out", tmp_path / "fresh", "--shuffle", "2").code == 0
    assert files_of(out) == files_of(tmp_path / "fresh")


def write_lines(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"text": "number {number}"}}\n' for number in range(count)))
    return path


def test_splits_are_disjoint_and_of_about_the_size_asked_for(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 3000)
    split = {"valid": 0.1, "test": 0.02}
    prepare_dataset([source], tmp_path / "out", PrepareSettings(split=split))
    ids = ids_of(tmp_path / "out")
    everything = [*ids["train"], *ids["valid"], *ids["test"]]
    assert len(set(everything)) == len(everything) == 3000
    assert 250 < len(ids["valid"]) < 350
    assert 35 < len(ids["test"]) < 85


def test_a_document_keeps_its_split_when_the_corpus_grows(tmp_path: Path) -> None:
    settings = PrepareSettings(split={"valid": 0.1})
    for count in (300, 400):
        source = write_lines(tmp_path / "in.jsonl", count)
        prepare_dataset([source], tmp_path / f"{count}", settings)
    small, large = ids_of(tmp_path / "300"), ids_of(tmp_path / "400")
    assert set(small["valid"]) <= set(large["valid"])
    assert set(small["train"]) <= set(large["train"])


@pytest.mark.parametrize("shuffle", [None, 5])
def test_dedup_moves_no_document_to_another_split_or_place(
    tmp_path: Path, shuffle: int | None
) -> None:
    """Split and order hang on a document's id and number, not on its rank among those kept."""
    lines = [f'{{"text": "number {n if n % 3 else n // 4}"}}\n' for n in range(600)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(lines))
    found = {}
    for dedup in ("none", "exact"):
        settings = PrepareSettings(split={"valid": 0.2, "test": 0.1}, shuffle=shuffle, dedup=dedup)
        prepare_dataset([source], tmp_path / dedup, settings)
        found[dedup] = ids_of(tmp_path / dedup)
    firsts = {f"in.jsonl:{lines.index(line) + 1}" for line in lines}
    assert 350 < len(firsts) < 550
    assert found["exact"] == {
        split: [id_ for id_ in ids if id_ in firsts] for split, ids in found["none"].items()
    }


@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_split_of_a_tiny_corpus_is_empty(tmp_path: Path, count: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", count)
    split = {"valid": 0.001, "test": 0.998}
    prepare_dataset([source], tmp_path / "out", PrepareSettings(split=split))
    ids = ids_of(tmp_path / "out")
    assert set(ids) == {"train", "valid", "test"}
    assert sum(map(len, ids.values())) == count


def test_more_splits_than_documents_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 2)
    settings = PrepareSettings(split={"valid": 0.1, "test": 0.1})
    with pytest.raises(DataError, match="2 documents cannot fill 3 splits"):
        prepare_dataset([source], tmp_path / "out", settings)


def test_a_shuffle_is_a_permutation_that_its_seed_decides(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 200)
    orders = {}
    for name, seed in (("none", None), ("one", 1), ("again", 1), ("two", 2)):
        prepare_dataset([source], tmp_path / name, PrepareSettings(shuffle=seed))
        orders[name] = ids_of(tmp_path / name)["train"]
    assert orders["none"] == [f"in.jsonl:{line}" for line in range(1, 201)]
    assert orders["one"] == orders["again"] != orders["two"] != orders["none"]
    assert sorted(orders["one"]) == sorted(orders["none"])
    neighbours = zip(orders["one"], orders["one"][1:], strict=False)
    steps = [abs(int(b.split(":")[1]) - int(a.split(":")[1])) for a, b in neighbours]
    assert sum(step == 1 for step in steps) < 10


def test_the_hash_behind_splits_and_shuffles_never_changes(tmp_path: Path) -> None:
    """A golden order: datasets prepared by earlier versions must be reproducible by later ones."""
    source = write_lines(tmp_path / "in.jsonl", 12)
    settings = PrepareSettings(split={"valid": 0.25}, shuffle=5)
    prepare_dataset([source], tmp_path / "out", settings)
    lines = {
        split: [int(id_.split(":")[1]) for id_ in ids]
        for split, ids in ids_of(tmp_path / "out").items()
    }
    assert lines == {"train": [5, 11, 12, 10, 1, 4, 7, 2, 9], "valid": [8, 3, 6]}


def test_the_manifest_counts_what_the_shards_hold(corpus: Path, tmp_path: Path) -> None:
    prepare_dataset([corpus], tmp_path / "out", SETTINGS)
    manifest = load_manifest(tmp_path / "out")
    texts = [path.read_bytes() for path in corpus.rglob("*.txt")]
    assert manifest.input.documents == manifest.input.files == 11
    assert sum(entry.documents for entry in manifest.splits.values()) == 11
    assert sum(entry.text_bytes for entry in manifest.splits.values()) == sum(map(len, texts))
    assert sum(entry.tokens for entry in manifest.splits.values()) == sum(map(len, texts)) + 11
