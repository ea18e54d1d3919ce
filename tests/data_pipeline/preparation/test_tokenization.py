"""Tokenizing one document."""

import json
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.tokenization import tokenize_document
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.tokenizers import train_tokenizer
from data_pipeline.tokenizers.pretrained import PretrainedTokenizer
from tests.data_pipeline.tokenizers.sample_tokenizers import with_unknown_as_only_special


def test_a_giant_run_of_blanks_is_tokenized(tmp_path: Path) -> None:
    """tiktoken's regular expressions give up on a million characters of one kind."""
    train = PrepareSettings(tokenizer="bpe", vocab_size=300)
    tokenizer = train_tokenizer(train, lambda: iter(["some text  to train on " * 9]))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    text = "a" + " " * 1_030_000 + "b" * 1_200_000
    (tmp_path / "in.txt").write_text(text)
    out = tmp_path / "out"
    options = PrepareSettings(tokenizer="file")
    prepare_dataset([tmp_path / "in.txt"], out, options, tokenizer_file=tmp_path / "tokenizer.json")
    data = open_split(out, "train")
    ids, _ = read_range(data, 0, data.num_tokens)
    assert tokenizer.decode(ids) == text


def test_a_document_that_holds_the_end_of_document_token_is_refused_by_name() -> None:
    content = json.loads(with_unknown_as_only_special("bpe").to_str())
    description = {"type": "file", "end_of_document": 0, "tokenizer": content}
    tokenizer = PretrainedTokenizer.from_description(description)
    assert len(list(tokenize_document(tokenizer, ["the cat sat"], document_id="a.txt"))) == 2
    with pytest.raises(DataError, match=r"b\.txt contains text .* end-of-document token, id 0"):
        list(tokenize_document(tokenizer, ["the cat 漢 sat"], document_id="b.txt"))
