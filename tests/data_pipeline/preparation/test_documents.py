"""The texts of the scan: a lost or damaged copy is reported, and groups change no byte."""

from pathlib import Path

import pytest

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.system.workers import Progress
from tests.data_pipeline.preparation.preparing import files_of, write_corpus

SPLIT_AND_SHUFFLED = PrepareSettings(
    split={"valid": 0.2, "test": 0.2}, shuffle=3, shard_bytes=12_000, block_bytes=2_000
)


def test_a_file_that_changes_is_refused_during_the_scan_and_read_only_once(
    corpus: Path, tmp_path: Path
) -> None:
    def rewrite_at(phase: str) -> Progress:
        def change(stage: str, done: int, total: int) -> None:
            if stage == phase and not done:
                (corpus / "10.txt").write_text("rewritten")

        return change

    prepare_dataset([corpus], tmp_path / "whole", SPLIT_AND_SHUFFLED)
    prepare_dataset([corpus], tmp_path / "out", SPLIT_AND_SHUFFLED, progress=rewrite_at("writing"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    with pytest.raises(DataError, match=r"10\.txt changed while it was being read"):
        prepare_dataset(
            [corpus], tmp_path / "new", SPLIT_AND_SHUFFLED, progress=rewrite_at("reading")
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.fault_row(50)
@pytest.mark.parametrize("damage", ["cut", "replaced", "gone", "failing"])
def test_a_disk_that_loses_or_cannot_read_the_texts_is_named_and_a_rerun_scans_again(
    corpus: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"

    def lose(stage: str, done: int, total: int) -> None:
        if stage == "writing" and not done:
            (texts,) = out.glob(".staging.tmp/units/texts-??????")
            size = texts.stat().st_size
            texts.unlink()
            if damage == "failing":
                texts.symlink_to("/proc/self/mem")  # reading there is an EIO
            elif damage != "gone":
                texts.write_bytes(b"x" * (size if damage == "replaced" else 10))

    with pytest.raises(UnfinishedError, match="texts-000000 cannot be read again"):
        prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED, progress=lose)
    prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED)
    prepare_dataset([corpus], tmp_path / "whole", SPLIT_AND_SHUFFLED)
    assert files_of(out) == files_of(tmp_path / "whole")


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
    monkeypatch.setattr(f"{MODULE}.CHUNK_BYTES", 3)
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
