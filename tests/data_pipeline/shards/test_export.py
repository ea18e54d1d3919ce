"""`txl data export`: what is exported is what was prepared, and `txl prepare` reads it again."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from data_pipeline.errors import DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.export import export_dataset, push_dataset
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.remote_path import dataset_path
from data_pipeline.tokenizers.byte_char_word import ByteTokenizer
from tests.support.commands import run_txl, txl

TEXTS = {
    "train": ["one\ntext", "zwei é \u2028 \x00 end", '{"text": "quoted"}', "a" * 5000],
    "valid": ["held out"],
    "test": ["last \t", "of all \r\n"],
}
IDS = {"train": [[5, 6, 7], [8], [9] * 3000], "test": [[1, 2]]}
SETTINGS = {
    "byte": PrepareSettings(shuffle=3, shard_bytes=100),
    "bpe": PrepareSettings(tokenizer="bpe", vocab_size=300, shuffle=3),
    "ids": PrepareSettings(format="ids", vocab_size=11, end_of_document=0),
}
Documents = dict[str, list[list[int]]]


def dataset(tmp_path: Path, kind: str) -> Path:
    source = tmp_path / "in"
    source.mkdir()
    for split, documents in (IDS if kind == "ids" else TEXTS).items():
        key = "ids" if kind == "ids" else "text"
        lines = [json.dumps({key: document}) + "\n" for document in documents]
        (source / f"{split}.jsonl").write_text("".join(lines))
    prepare_dataset([source], tmp_path / "data", SETTINGS[kind])
    return tmp_path / "data"


def tokens_of(directory: Path) -> Documents:
    """The tokens of all documents, by split, in order."""
    tokens: Documents = {}
    for name in load_manifest(directory).splits:
        split = open_split(directory, name)
        tokens[name] = []
        for block, num_tokens in enumerate(split.block_tokens.tolist()):
            starts = [*split.document_starts(block).tolist(), num_tokens]
            whole = split.read(block, 0, num_tokens).tolist()
            tokens[name] += [whole[a:b] for a, b in itertools.pairwise(starts)]
    return tokens


@pytest.mark.parametrize("kind", ["byte", "bpe", "ids"])
@pytest.mark.parametrize("format", ["jsonl", "parquet", "bin"])
def test_an_export_is_prepared_to_the_same_tokens(tmp_path: Path, kind: str, format: str) -> None:
    data = dataset(tmp_path, kind)
    content = export_dataset(dataset_path(str(data)), tmp_path / "out", format)
    assert json.loads((tmp_path / "out" / "export.json").read_bytes()) == content
    manifest = load_manifest(data)
    is_ids = kind == "ids" or format == "bin"
    settings = PrepareSettings(tokenizer="file")
    if is_ids:
        settings = PrepareSettings(
            format="ids",
            vocab_size=content["vocab_size"],
            end_of_document=content["end_of_document"],
            dtype=content["dtype"] if format == "bin" else None,
        )
    tokenizer = None if is_ids else data / "tokenizer.json"
    prepare_dataset([tmp_path / "out"], tmp_path / "again", settings, tokenizer_file=tokenizer)
    assert tokens_of(tmp_path / "again") == tokens_of(data)
    assert content["dataset_digest"] == manifest.digest
    assert {name: each["documents"] for name, each in content["splits"].items()} == {
        name: entry.documents for name, entry in manifest.splits.items()
    }


def rows(path: Path) -> list[dict[str, object]]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rows_have_id_split_and_the_exact_text_in_the_order_of_the_dataset(
    tmp_path: Path, format: str
) -> None:
    data = dataset(tmp_path, "byte")
    content = export_dataset(dataset_path(str(data)), tmp_path / "out", format)
    assert content["text"] == "exact"
    for split, texts in TEXTS.items():
        exported = rows(tmp_path / "out" / f"{split}.{format}")
        assert [row["id"] for row in exported] == [
            each.id for each in open_split(data, split).documents()
        ]
        by_line = {f"{split}.jsonl:{n}": text for n, text in enumerate(texts, 1)}
        assert {row["id"]: row["text"] for row in exported} == by_line
        assert {row["split"] for row in exported} == {split}


def test_bin_is_a_flat_little_endian_array(tmp_path: Path) -> None:
    data = dataset(tmp_path, "ids")
    content = export_dataset(dataset_path(str(data)), tmp_path / "out", "bin", splits=["train"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "export.json",
        "train.bin",
    ]
    array = np.fromfile(tmp_path / "out" / "train.bin", np.dtype(content["dtype"]))
    assert array[:6].tolist() == [0, 5, 6, 7, 0, 8]
    assert len(array) == content["splits"]["train"]["tokens"]
    assert content["end_of_document"] == 0


def test_a_text_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for split in ("train", "test"):
        np.array([256, 65, 255], "<u2").tofile(tmp_path / "in" / f"{split}.bin")
    settings = PrepareSettings(format="ids", vocab_size=257, end_of_document=256, dtype="uint16")
    prepare_dataset([tmp_path / "in"], tmp_path / "data", settings)
    data = dataset_path(str(tmp_path / "data"))
    with pytest.MonkeyPatch.context() as patch:
        # The same ids, read as bytes: no text that txl prepare accepts has such tokens.
        patch.setattr("data_pipeline.shards.export.open_tokenizer", lambda *_: ByteTokenizer())
        with pytest.raises(DataError, match=r"document train\.bin.*not UTF-8 at byte 1.*bin"):
            export_dataset(data, tmp_path / "out", "jsonl")
    assert not (tmp_path / "out").exists()


def test_an_output_with_other_files_and_a_missing_split_are_refused(tmp_path: Path) -> None:
    data = dataset_path(str(dataset(tmp_path, "byte")))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds other files: mine\.txt"):
        export_dataset(data, tmp_path / "out", "jsonl")
    with pytest.raises(DataError, match="has no split 'dev'"):
        export_dataset(data, tmp_path / "new", "jsonl", splits=["dev"])
    assert not (tmp_path / "new").exists()


def test_words_are_exported_as_the_model_reads_them_and_this_is_said(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the cat  sat\nthe end\n")
    prepare_dataset([tmp_path / "in.txt"], tmp_path / "data", PrepareSettings(tokenizer="word"))
    data = dataset_path(str(tmp_path / "data"))
    content = export_dataset(data, tmp_path / "out", "jsonl")
    assert content["text"] == "decoded"
    assert rows(tmp_path / "out" / "train.jsonl")[0]["text"] == "the cat sat\nthe end\n"


def test_the_command_exports_and_reports(tmp_path: Path) -> None:
    data = dataset(tmp_path, "byte")
    options = ("--out", tmp_path / "out", "--split", "test", "--json")
    code, output = run_txl("data", "export", data, *options)
    assert code == 0, output
    content = json.loads(output.splitlines()[-1])
    assert list(content["splits"]) == ["test"]
    assert [row["split"] for row in rows(tmp_path / "out" / "test.jsonl")] == ["test", "test"]


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("some words of text\n" * 200_000)
    settings = PrepareSettings(format="lines")
    prepare_dataset([tmp_path / "in.txt"], tmp_path / "data", settings)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "txl_dist", "data", "export", tmp_path / "data", "--out", out]
    process = subprocess.Popen(command)
    while not any(path.stat().st_size for path in out.glob(".staging.tmp/train.jsonl")):
        assert process.poll() is None, "the export ended before it could be killed"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [path.name for path in out.iterdir()] == [".staging.tmp"]
    assert txl(*command[3:]).returncode == 0
    assert sorted(path.name for path in out.iterdir()) == ["export.json", "train.jsonl"]


def test_the_copy_at_a_url_is_exported_like_the_directory(tmp_path: Path, bucket: Any) -> None:
    del bucket  # starts the server
    data = dataset(tmp_path, "byte")
    push_dataset(data, "s3://bucket/data")
    export_dataset(dataset_path(str(data)), tmp_path / "1", "jsonl")
    export_dataset(dataset_path("s3://bucket/data"), tmp_path / "2", "jsonl")
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()
