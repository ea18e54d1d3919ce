"""Texts are read twice: changed or lost files are reported, and groups change no byte."""

import gzip
from pathlib import Path

import pytest

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from tests.data_pipeline.preparation.preparing import files_of, prepare, write_corpus

SPLIT_AND_SHUFFLED = PrepareSettings(
    split={"valid": 0.2, "test": 0.2}, shuffle=3, shard_bytes=12_000, block_bytes=2_000
)


def test_a_file_that_changes_between_the_passes_is_refused(corpus: Path, tmp_path: Path) -> None:
    def change(stage: str, done: int, total: int) -> None:
        if stage == "writing":
            (corpus / "sub" / "09.txt").write_text("rewritten")
            (corpus / "10.txt").write_text("rewritten")

    with pytest.raises(DataError, match="changed while it was being read"):
        prepare_dataset([corpus], tmp_path / "out", SPLIT_AND_SHUFFLED, progress=change)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault_row(50)
def test_a_disk_that_fails_on_the_second_reading_is_named_and_costs_no_finished_work(
    corpus: Path, tmp_path: Path
) -> None:
    path, aside, out = corpus / "10.txt", tmp_path / "aside", tmp_path / "out"

    def fail(stage: str, done: int, total: int) -> None:
        if stage == "writing" and not done:
            path.rename(aside)
            path.symlink_to("/proc/self/mem")  # reading there is an EIO

    with pytest.raises(UnfinishedError, match=r"10\.txt cannot be read again: Input/output error"):
        prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED, progress=fail)
    path.unlink()
    aside.rename(path)
    assert prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED).reused_units


@pytest.mark.parametrize("damage", ["cut", "replaced", "gone", "failing"])
def test_a_spill_file_that_is_lost_is_not_blamed_on_the_input(
    corpus: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    for path in corpus.rglob("*.txt"):
        path.with_suffix(".txt.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()

    def lose(stage: str, done: int, total: int) -> None:
        if stage == "writing" and not done:
            (spill,) = out.glob(".staging.tmp/units/spill-??????")
            size = spill.stat().st_size
            spill.unlink()
            if damage == "failing":
                spill.symlink_to("/proc/self/mem")
            elif damage != "gone":
                spill.write_bytes(b"x" * (size if damage == "replaced" else 10))

    with pytest.raises(UnfinishedError, match="spill-000000 cannot be read again"):
        prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED, progress=lose)
    prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED)  # its scan is done again


def test_texts_that_must_be_spilled_give_the_same_bytes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(lines, tmp_path / "plain", 10**6)
    monkeypatch.setattr("data_pipeline.readers.kinds.must_spill", lambda file: "b.js" in file.name)
    prepare(lines, tmp_path / "spilled", 10**6)
    assert files_of(tmp_path / "spilled") == files_of(tmp_path / "plain")


MODULE = "data_pipeline.preparation.documents"


@pytest.mark.parametrize(("shuffle", "limits"), [(None, (1, 0)), (5, (300, 40))])
def test_the_size_of_groups_does_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: int | None, limits: tuple[int, int]
) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(12)])
    settings = PrepareSettings(format="lines", shuffle=shuffle, shard_bytes=700, block_bytes=512)
    prepare_dataset([tmp_path / "in"], tmp_path / "whole", settings, max_reject_rate=1)
    for name, value in zip(("GROUP_BYTES", "MAX_SHORT_BYTES"), limits, strict=True):
        monkeypatch.setattr(f"{MODULE}.{name}", value)
    prepare_dataset([tmp_path / "in"], tmp_path / "out", settings, max_reject_rate=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(("recipe", "text"), [("wt103", " \t"), (None, "kept")])
def test_a_short_document_without_tokens_is_refused_by_name(
    tmp_path: Path, recipe: str | None, text: str
) -> None:
    (tmp_path / "in").mkdir()
    for name, content in (("a.txt", "one two"), ("b.txt", text), ("c.txt", "three")):
        (tmp_path / "in" / name).write_text(content)
    settings = PrepareSettings(format="text", tokenizer="word", recipe=recipe)
    if recipe:
        with pytest.raises(DataError, match=r"b\.txt has no tokens"):
            prepare_dataset([tmp_path / "in"], tmp_path / "out", settings)
    else:
        assert prepare_dataset([tmp_path / "in"], tmp_path / "out", settings).manifest
