"""What `txl prepare` does with an output directory that is not empty."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.data_pipeline.preparation.preparing import files_of

Txl = Callable[..., Any]


def test_a_list_of_rejects_that_was_being_written_is_removed_and_nothing_else(
    txl: Txl, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("text")
    out.mkdir()
    left, foreign = out / ".rejects.jsonl.4711.tmp", out / ".rejects.jsonl.mine.tmp"
    left.write_text('{"file"')
    foreign.write_text("")
    ended = txl("prepare", source, "--out", out)
    assert ended.code == 3
    assert "do not belong to a dataset: .rejects.jsonl.mine.tmp." in ended.err
    assert left.exists(), "nothing was touched"
    foreign.unlink()
    assert txl("prepare", source, "--out", out).code == 0
    assert not left.exists()


def test_a_second_run_finds_the_dataset_complete(txl: Txl, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = txl("prepare", corpus, "--out", out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    second = txl("prepare", corpus, "--out", out)
    assert (first.code, second.code) == (0, 0)
    assert "already complete" not in first.out
    assert "already complete" in second.out
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}


def test_another_dataset_in_the_output_is_refused_with_the_differences(
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


def test_other_files_in_the_output_are_refused_and_unchanged(
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
