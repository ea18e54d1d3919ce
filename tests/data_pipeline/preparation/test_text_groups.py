"""Short documents are read and tokenized in groups, with the bytes of one at a time."""

from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from tests.data_pipeline.preparation.preparing import files_of, write_corpus

MODULE = "data_pipeline.preparation.text_groups"


@pytest.mark.parametrize(("shuffle", "limits"), [(None, (0, 0)), (5, (300, 40))])
def test_the_size_of_groups_does_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: int | None, limits: tuple[int, int]
) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(12)])
    settings = PrepareSettings(format="lines", shuffle=shuffle, shard_bytes=700, block_bytes=512)
    prepare_dataset([tmp_path / "in"], tmp_path / "whole", settings, max_reject_rate=1)
    for name, value in zip(("GROUP_BYTES", "MAX_SHORT_BYTES"), limits, strict=True):
        monkeypatch.setattr(f"{MODULE}.{name}", value)
    monkeypatch.setattr(f"{MODULE}._MAX_OPEN_FILES", 2)
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
