"""Choosing the tokenizer of a dataset."""

from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.tokenizers import ready_tokenizer
from tests.data_pipeline.tokenizers.sample_tokenizers import FILE, TOKENIZER


def test_the_tokenizer_file_of_a_dataset_is_used_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.to_json())
    assert ready_tokenizer(FILE, path).digest == TOKENIZER.digest


@pytest.mark.parametrize(
    "content",
    ["[]", '{"model": {}}', '{"model": {"type": "BPE", "vocab": {"a": 4}, "merges": []}}'],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError):
        ready_tokenizer(FILE, path)


def test_a_file_is_given_exactly_for_kind_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file"):
        ready_tokenizer(FILE)
    with pytest.raises(ConfigError, match="byte"):
        ready_tokenizer(PrepareSettings(), tmp_path / "x")
