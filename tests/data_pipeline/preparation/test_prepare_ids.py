"""Datasets of token ids: the same documents from every kind of file, and the same bytes always."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.data_commands import excerpts
from data_pipeline.shards.manifest import PrepareSettings
from tests.data_pipeline.preparation.preparing import Backwards, files_of, tokens_of
from tests.data_pipeline.readers.reading import END, VOCAB_SIZE, WRITERS

DOCUMENTS = [[1 + (7 * n + k) % (VOCAB_SIZE - 1) for k in range(1 + 5 * n)] for n in range(9)]
SETTINGS = PrepareSettings(
    format="ids", vocab_size=VOCAB_SIZE, end_of_document=END, dtype="uint16", block_bytes=512
)


def test_the_same_bytes_in_any_order_of_units_and_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for number, suffix in enumerate(WRITERS):
        WRITERS[suffix](tmp_path / "in" / f"{number}.{suffix}", DOCUMENTS)
    monkeypatch.setattr("data_pipeline.preparation.scan.UNIT_BYTES", 200)
    settings = SETTINGS.model_copy(
        update={"split": {"valid": 0.3}, "shuffle": 4, "shard_bytes": 700}
    )
    manifest = prepare_dataset([tmp_path / "in"], tmp_path / "a", settings).manifest
    assert (manifest.vocab_size, manifest.end_of_document) == (VOCAB_SIZE, END)
    prepare_dataset([tmp_path / "in"], tmp_path / "b", settings, workers=Backwards())
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    both = tokens_of(tmp_path / "a") + tokens_of(tmp_path / "a", "valid")
    expected = [[END, *document] for document in DOCUMENTS] * len(WRITERS)
    assert sorted(both) == sorted(expected), "the ids of every kind of file"


def test_the_settings_of_ids_are_stored_only_with_ids(tmp_path: Path) -> None:
    options = {"end_of_document", "dtype"}
    assert not options & PrepareSettings().model_dump().keys(), "other manifests stay the same"
    assert options <= SETTINGS.model_dump().keys()
    assert PrepareSettings.model_validate_json(SETTINGS.model_dump_json()) == SETTINGS


def test_a_bad_document_is_named_and_a_raised_limit_skips_it(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    WRITERS["jsonl"](source, [[1], [2, 3, VOCAB_SIZE], [4]])
    with pytest.raises(DataError, match=r"in.jsonl:2:byte \d+: token id 500 at position 2"):
        prepare_dataset([source], tmp_path / "out", SETTINGS)
    prepare_dataset([source], tmp_path / "out", SETTINGS, max_reject_rate=0.5)
    assert tokens_of(tmp_path / "out") == [[END, 1], [END, 4]]


def test_inspection_shows_ids_or_their_names(tmp_path: Path) -> None:
    WRITERS["jsonl"](tmp_path / "in.jsonl", [[1, 2, 3]])
    (tmp_path / "names.json").write_text('{"Pitch_60": 1, "Bar": 3}')
    prepare_dataset([tmp_path / "in.jsonl"], tmp_path / "plain", SETTINGS)
    prepare_dataset(
        [tmp_path / "in.jsonl"],
        tmp_path / "named",
        SETTINGS,
        tokenizer_file=tmp_path / "names.json",
    )
    (plain,), (named,) = (excerpts(tmp_path / name, documents=1) for name in ("plain", "named"))
    assert (plain.text, named.text) == ("1 2 3", "Pitch_60 2 Bar")
    assert np.array_equal(tokens_of(tmp_path / "plain"), tokens_of(tmp_path / "named"))
