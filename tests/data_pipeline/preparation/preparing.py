"""Shared by the tests of preparation: inputs, workers that stop, preparing with small units."""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from data_pipeline.preparation.prepare import PrepareReport, prepare_dataset
from data_pipeline.shards.data_commands import excerpts
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.tokenizers import ByteTokenizer


def tokens_of(directory: Path, split: str = "train") -> list[list[int]]:
    """The tokens of every document of a split."""
    source = open_split(directory, split)
    documents = []
    for block, count in enumerate(source.block_tokens.tolist()):
        starts = source.document_starts(block).tolist()
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            documents.append(source.read(block, start, stop).tolist())
    return documents


def texts_of(directory: Path, split: str = "train") -> dict[str, str]:
    """Document id to text of a whole split of byte tokens."""
    texts = map(ByteTokenizer().decode, tokens_of(directory, split))
    return dict(zip(ids_of(directory)[split], texts, strict=True))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def ids_of(directory: Path) -> dict[str, list[str]]:
    """Per split, its documents' ids in order."""
    texts: dict[str, list[str]] = {}
    for excerpt in excerpts(directory, documents=10**6):
        texts.setdefault(excerpt.split, []).append(excerpt.document_id)
    return texts


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


SETTINGS = PrepareSettings(
    split={"valid": 0.2}, shuffle=3, dedup="exact", shard_bytes=900, block_bytes=600
)


class Backwards:
    """Workers that take all units, then answer from the last to the first."""

    num_workers = 1
    peak_memory_bytes = 0

    def map(
        self, function: Callable[[Any], Any], units: Iterable[Any]
    ) -> Iterator[tuple[int, Any]]:
        for number, unit in reversed(list(enumerate(units))):
            yield number, function(unit)


def prepare(source: Path, out: Path, unit_bytes: int, **options: Any) -> PrepareReport:
    """Prepare with units of about `unit_bytes` to scan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.preparation.scan.UNIT_BYTES", unit_bytes)
        options = {"settings": SETTINGS, "max_reject_rate": 1.0, **options}
        return prepare_dataset([source], out, **options)


class StopsAfter(Backwards):
    """Workers that are interrupted after some units."""

    def __init__(self, units: int) -> None:
        self.left = units

    def map(
        self, function: Callable[[Any], Any], units: Iterable[Any]
    ) -> Iterator[tuple[int, Any]]:
        for number, unit in enumerate(units):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield number, function(unit)


def stop_after(units: int, source: Path, out: Path, unit_bytes: int = 500, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, unit_bytes, workers=StopsAfter(units), **options)


def compressed(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.utime(path, (1, 1))
    return path
