"""Tokenizing one document."""

from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.tokenizers import train_tokenizer


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
