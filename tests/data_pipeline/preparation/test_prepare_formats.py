"""Every format, compression and kind of tokenizer through work units: the same bytes."""

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline.errors import DataError
from data_pipeline.preparation.finished_units import RECORDS
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.processes.workers import ProcessWorkers
from data_pipeline.shards.inspection import excerpts
from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.shards.verify import verify_dataset
from data_pipeline.streams.cursor import read_range
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from tests.data_pipeline.preparation.test_prepare import files_of
from tests.data_pipeline.preparation.test_work_units import Backwards, StopsAfter, prepare

Txl = Callable[..., Any]
TEXTS = st.sampled_from(["one", "two words", "täler 潮", "a\nline\n\nor two", "long " * 90, " = x"])
OPTIONS = {"shuffle": 5, "split": {"valid": 0.3}, "shard_bytes": 700, "block_bytes": 512}


def write_corpus(folder: Path, texts: list[str]) -> None:
    """The texts in files of every kind, the lines of each long enough to be cut."""
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    wiki = "before\n" + "".join(f" = Title {n} = \n {text} \n" for n, text in enumerate(texts))
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + b'{"text": "cut off')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "d.txt").write_text("﻿" + "\n".join(texts), "utf-8")
    (folder / "e.txt.gz").write_bytes(gzip.compress("\r\n".join(texts).encode(), mtime=0)[:-1])
    (folder / "f.txt.zst").write_bytes(zstandard.compress("|".join(texts).encode()))
    parquet.write_table(pa.table({"text": [*texts, None, ""]}), folder / "g.parquet")
    (folder / "h.wiki.tokens").write_text(" = First = \n" + wiki, "utf-8")
    (folder / "i.wiki.tokens.gz").write_bytes(gzip.compress((" = One = \n" + wiki).encode(), 1))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=8),
    unit_bytes=st.integers(20, 900),
    kind=st.sampled_from(["byte", "char", "word"]),
    format=st.sampled_from(["auto", "lines"]),
)
def test_no_byte_depends_on_how_files_of_any_format_are_cut(
    texts: list[str], unit_bytes: int, kind: Any, format: str
) -> None:
    options = PrepareSettings(tokenizer=kind, format=format, **OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        source, whole, cut = (Path(folder) / name for name in ("in", "whole", "cut"))
        write_corpus(source, texts)
        prepare(source, whole, 10**7, settings=options)
        prepare(source, cut, unit_bytes, settings=options, workers=Backwards())
        assert files_of(cut) == files_of(whole)
        assert verify_dataset(cut).problems == []
        ids = [shown.document_id for shown in excerpts(cut, documents=10**6)]
        assert len(set(ids)) == len(ids)


def test_every_format_gives_the_texts_that_were_put_in(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", ["one", "täler 潮", "a\nb"])
    prepare(tmp_path / "in", tmp_path / "out", 30, settings=PrepareSettings())
    shown = {each.document_id: each.text for each in excerpts(tmp_path / "out", documents=99)}
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "g.parquet"):
        assert [shown[f"{name}:{line}"] for line in (1, 2)] == ["one", "täler 潮"]
    assert shown["f.txt.zst"].startswith("one|täler 潮|a")
    assert "e.txt.gz" not in shown, "it is truncated"
    assert load_manifest(tmp_path / "out").input.rejected == 3


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
    units = 1 + (kind == "char") * len(load_manifest(tmp_path / "whole").splits["train"].shards)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "in", out, 10**6, settings=options, workers=StopsAfter(units))
    assert (out / ".staging.tmp" / RECORDS / "tokenizer.json").is_file()
    monkeypatch.setattr("data_pipeline.preparation.work_units.count_symbols", None)
    monkeypatch.setattr("data_pipeline.preparation.tokenizer_training.train_tokenizer", None)
    done = prepare(tmp_path / "in", out, 10**6, settings=options)
    assert done.reused_units == 2, "the scan and the tokenizer"
    assert files_of(out) == files_of(tmp_path / "whole")


def test_finished_work_of_another_tokenizer_file_is_not_used(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", ["one", "two"] * 9)
    given = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(given, ("one two", "three four"), strict=True):
        char = train_tokenizer(PrepareSettings(tokenizer="char"), lambda text=text: iter([text]))
        path.write_text(char.to_json())
    options = {"settings": PrepareSettings(tokenizer="file", **OPTIONS)}
    out, notes = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "in", out, 99, tokenizer_file=given[0], workers=StopsAfter(5), **options)
    done = prepare(tmp_path / "in", out, 99, tokenizer_file=given[1], note=notes.append, **options)
    assert "the tokenizer file changed" in notes[1]
    assert done.reused_units == 0
    assert load_manifest(out).tokenizer_digest == load_tokenizer(given[1]).digest
    with pytest.raises(DataError, match="holds another dataset: tokenizer: "):
        prepare(tmp_path / "in", out, 99, tokenizer_file=given[0], **options)
    assert prepare(tmp_path / "in", out, 99, tokenizer_file=given[1], **options).already_complete


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("piece_bytes", [7, 2**20])
@pytest.mark.parametrize(("recipe", "kind"), [("text8", "char"), ("enwik8", "byte")])
def test_a_corpus_of_one_document_is_split_by_its_tokens(
    tmp_path: Path,
    recipe: Any,
    kind: Any,
    suffix: str,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from data_pipeline.readers import formats

    reading = formats.read_pieces
    monkeypatch.setattr(
        "data_pipeline.preparation.document_batch.read_pieces",
        lambda *about, **more: reading(*about, piece_bytes=piece_bytes, **more),
    )
    text = "".join(chr(97 + n % 25) + "ä" * (n % 3 == 0) for n in range(301))
    raw = text.encode()
    source = tmp_path / f"whole{suffix}"
    source.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    options = PrepareSettings(tokenizer=kind, recipe=recipe)
    prepare_dataset([source], tmp_path / "out", options)
    tokenizer = open_tokenizer(tmp_path / "out")
    found = {}
    for split in ("train", "valid", "test"):
        data = open_split(tmp_path / "out", split)
        ids, _ = read_range(data, 0, data.num_tokens)
        found[split] = tokenizer.decode_bytes(ids)
        assert load_manifest(tmp_path / "out").splits[split].text_bytes == len(found[split])
    assert b"".join(found.values()) == raw
    part = (len(text) if kind == "char" else len(raw)) // 20
    for split in ("valid", "test"):
        size = len(found[split].decode()) if kind == "char" else len(found[split])
        assert abs(size - part) <= (kind == "byte"), "a cut in a character moves to its beginning"
    assert verify_dataset(tmp_path / "out").problems == []
    assert prepare_dataset([source], tmp_path / "out", options).already_complete


def test_a_recipe_with_its_own_splits_refuses_others_and_more_than_one_document(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    command = ("prepare", corpus, "--out", tmp_path / "out", "--recipe", "enwik8")
    ended = txl(*command, "--split", "valid=0.1")
    assert ended.code == 2
    assert "recipe enwik8 has its own valid and test" in ended.err
    ended = txl(*command)
    assert ended.code == 3
    assert "takes one document" in ended.err
    assert "the input has 11: 00.txt, 02.txt, 04.txt, ..." in ended.err
    (tmp_path / "short.txt").write_text("nineteen characters")
    assert txl("prepare", tmp_path / "short.txt", *command[2:]).code == 3
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "x" * 99}))
    ended = txl("prepare", tmp_path / "one.jsonl", *command[2:])
    assert ended.code == 3
    assert "is read as jsonl" in ended.err
    assert not (tmp_path / "out").exists()


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
