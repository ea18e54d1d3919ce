"""A tokenizer trained in work units is the one of the train split."""

from pathlib import Path
from typing import Any

import pytest

from data_pipeline.preparation.finished_units import RECORDS
from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.cursor import read_range
from data_pipeline.system.workers import ProcessWorkers
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from tests.data_pipeline.preparation.preparing import StopsAfter, files_of, prepare, write_corpus

OPTIONS = {"shuffle": 5, "split": {"valid": 0.3}, "shard_bytes": 700, "block_bytes": 512}


@pytest.mark.parametrize("kind", ["char", "word", "bpe"])
def test_a_tokenizer_trained_in_units_is_that_of_the_train_split_in_its_order(
    tmp_path: Path, kind: Any
) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(40)])
    limits = {"vocab_size": 300, "train_bytes": 5000} if kind == "bpe" else {"min_freq": 2}
    options = PrepareSettings(tokenizer=kind, **limits, **OPTIONS)
    with ProcessWorkers(2) as workers:
        prepare(tmp_path / "in", tmp_path / "out", 900, settings=options, workers=workers)
    prepare(tmp_path / "in", tmp_path / "bytes", 900, settings=PrepareSettings(**OPTIONS))
    source, tokenizer = (
        open_split(tmp_path / "bytes", "train"),
        load_tokenizer(tmp_path / "bytes" / "tokenizer.json"),
    )
    ids, _ = read_range(source, 0, source.num_tokens)
    ends = [*(ids == tokenizer.end_of_document).nonzero()[0][1:], len(ids)]
    starts = [0, *ends[:-1]]
    texts = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]
    expected = train_tokenizer(options, lambda: iter(texts))
    assert open_tokenizer(tmp_path / "out").digest == expected.digest


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_trained_tokenizer_is_not_trained_again_by_a_rerun(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "in", ["one", "two"] * 9)
    size = 300 if kind == "bpe" else None
    options = PrepareSettings(tokenizer=kind, vocab_size=size, **OPTIONS)
    prepare(tmp_path / "in", tmp_path / "whole", 10**6, settings=options)
    units = 1 + len(load_manifest(tmp_path / "whole").splits["train"].shards)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "in", out, 10**6, settings=options, workers=StopsAfter(units))
    assert (out / ".staging.tmp" / RECORDS / "tokenizer.json").is_file()
    monkeypatch.setattr("data_pipeline.preparation.work_units.count_symbols", None)
    monkeypatch.setattr("data_pipeline.preparation.tokenizer_training.tokenizer_of_counts", None)
    done = prepare(tmp_path / "in", out, 10**6, settings=options)
    assert done.reused_units == 2, "the scan and the tokenizer"
    assert files_of(out) == files_of(tmp_path / "whole")


def test_progress_of_counting_ends_at_its_total(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(40)])
    options = PrepareSettings(tokenizer="bpe", vocab_size=300, train_bytes=5000, **OPTIONS)
    counting = []

    def note(phase: str, done: int, total: int) -> None:
        if phase == "counting":
            counting.append((done, total))

    report = prepare(tmp_path / "in", tmp_path / "out", 900, settings=options, progress=note)
    done, total = counting[-1]
    assert done == total < report.manifest.splits["train"].text_bytes
