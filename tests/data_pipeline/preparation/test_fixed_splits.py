"""Recipes that split one document at fixed positions."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.shards.verify import verify_dataset
from data_pipeline.streams.cursor import read_range

Txl = Callable[..., Any]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("chunk_bytes", [7, 2**20])
@pytest.mark.parametrize(("recipe", "kind"), [("text8", "char"), ("enwik8", "byte")])
def test_a_corpus_of_one_document_is_split_by_its_tokens(
    tmp_path: Path,
    recipe: Any,
    kind: Any,
    suffix: str,
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from data_pipeline.readers import formats

    reading = formats.read_text_chunks
    monkeypatch.setattr(
        "data_pipeline.preparation.document_batch.read_text_chunks",
        lambda *about, **more: reading(*about, chunk_bytes=chunk_bytes, **more),
    )
    text = "".join(chr(97 + n % 25) + "ä" * (n % 3 == 0) for n in range(301))
    raw = text.encode()
    source = tmp_path / f"whole{suffix}"
    source.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    options = PrepareSettings(tokenizer=kind, recipe=recipe)
    prepare_dataset([source], tmp_path / "out", options)
    tokenizer = open_tokenizer(tmp_path / "out")
    texts = {}
    for split in ("train", "valid", "test"):
        data = open_split(tmp_path / "out", split)
        ids, _ = read_range(data, 0, data.num_tokens)
        texts[split] = tokenizer.decode_bytes(ids)
        assert load_manifest(tmp_path / "out").splits[split].text_bytes == len(texts[split])
    assert b"".join(texts.values()) == raw
    part = (len(text) if kind == "char" else len(raw)) // 20
    for split in ("valid", "test"):
        size = len(texts[split].decode()) if kind == "char" else len(texts[split])
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
