"""The kind of a file: by its suffix or its first bytes, and which .json is refused."""

import gzip
import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.readers import IdRules, Reject
from tests.data_pipeline.readers.reading import (
    find,
    kinds_of,
    one_file,
    only_reject,
    read,
    texts,
)
from tests.support.corpus_layouts import write_files

LINES = b'{"text": "one"}\n{"text": "two"}\n'
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": lambda raw: gzip.compress(raw, mtime=0),
    ".gzip": lambda raw: gzip.compress(raw, mtime=0),
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize(
    "raw",
    [
        LINES,
        b"\xef\xbb\xbf\n \n" + LINES,
        b'{"text": "cut \n' + LINES[16:],  # the first line is damaged, the second is not
        b'{"text": "one line only"}',
        b'{"text": "' + b"long " * 30_000 + b'"}\n' + LINES,
        b"",
    ],
    ids=["lines", "blank", "damaged", "one", "long", "empty"],
)
def test_json_lines_are_read_as_such_under_every_compression(
    tmp_path: Path, suffix: str, raw: bytes
) -> None:
    path = tmp_path / f"c4.json{suffix}"
    path.write_bytes(PACKED[suffix](raw))
    assert one_file(path).kind == "jsonl"
    if raw == LINES:
        assert texts(read(one_file(path))) == texts(read(one_file(path, "jsonl"))) == ["one", "two"]


@pytest.mark.parametrize("format", ["auto", "jsonl"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("raw", "filter"),
    [
        (b'[{"text": "one"}, {"text": "two"}]', "'.[]'"),
        (b'\xef\xbb\xbf\n [\n {"text": "one"},\n {"text": "two"}\n]', "'.[]'"),
        (b'{\n "text": "one"\n}', "."),
        (b'{"text": "one",\n "n": {\n "a": 1}}\n', "."),
    ],
)
def test_other_json_is_refused_with_the_command_that_makes_lines_of_it(
    tmp_path: Path, raw: bytes, filter: str, suffix: str, format: str
) -> None:
    path = tmp_path / f"all of it.json{suffix}"
    path.write_bytes(PACKED[suffix](raw))
    with pytest.raises(DataError, match=r"all of it\.json.* --format text") as refused:
        find(tmp_path, format=format)
    assert f"jq -c {filter} " in str(refused.value)
    if shutil.which("jq"):
        command = ["jq", "-c", filter.strip("'")]
        lines = subprocess.run(command, input=raw, check=True, capture_output=True).stdout
        assert all(isinstance(json.loads(line), dict) for line in lines.splitlines())
    assert kinds_of(find(path, format="text")) == {"text": 1}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_format_that_is_asked_for_takes_every_compression_of_its_files(
    tmp_path: Path, format: str
) -> None:
    suffixes = {"jsonl": (".jsonl", ".ndjson", ".json"), "parquet": (".parquet", ".pq")}[format]
    names = {f"a{suffix}{packed}" for suffix in suffixes for packed in PACKED}
    for name in names:
        packed = next(each for each in reversed(PACKED) if name.endswith(each))
        (tmp_path / name).write_bytes(PACKED[packed](LINES))
    (tmp_path / "b.txt.zstd").write_bytes(b"")
    found = find(tmp_path, format=format)
    assert {file.name for file in found.files} == names
    assert +found.ignored == {".txt.zstd": 1}
    read_as_lines = names if format == "jsonl" else set()
    found = find(tmp_path, format="lines")
    assert {file.name for file in found.files} == {"b.txt.zstd", *read_as_lines}


def test_prepare_says_what_every_suffix_is_read_as(txl: Callable[..., Any], tmp_path: Path) -> None:
    files = {"a.json": LINES, "b.json.gz": gzip.compress(LINES), "c.txt": "text", "d": "text"}
    folder = write_files(tmp_path / "in", files)
    ended = txl("prepare", folder, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    summary = "read as jsonl: 1 .json, 1 .json.gz; text: 1 .txt, 1 without suffix"
    assert summary in ended.out
    assert summary.replace("read", "reading", 1) in ended.err, "printed before the work, too"
    content = json.loads(txl("prepare", folder, "--out", tmp_path / "out", "--json").out)
    assert content["formats"] == {"jsonl": 2, "text": 2}
    assert content["read_as"] == {
        "jsonl": {".json": 1, ".json.gz": 1},
        "text": {".txt": 1, "without suffix": 1},
    }
    assert content["input"]["documents"] == 6


LONG_LINE = b'{"text": "' + b"long " * 30_000 + b'"}\n'
OTHER_NAMES = {
    "AA/wiki_00": LINES,
    "AB/wiki_00": b"\xef\xbb\xbf\n" + LONG_LINE,
    "a.jsonlines": LINES,
    "b.jl": LINES,
    "c.ldjson.gz": gzip.compress(LINES),
    "d.txt": b'{"text": "one"}\n{"text": "cut',
    "part-00000": b'{"body": "one"}\n{"body": "two"}',
}
NO_JSON_LINES = {
    "julia.jl": b"{a = 1}\nf(x) = 2x\n",
    "map.map": b'{"version": 3, "mappings": "' + b"A" * 100_000 + b'"}',
    "notebook.ipynb": b'{\n "cells": []\n}\n',
    "quoted.txt": b'{"text": "one"} is an example.\n',
    "two.txt": b'{"body": "one"}\nand prose\n',
    "list.txt": b"[1, 2]\n[3]\n",
}


def test_json_lines_are_recognised_by_content_under_other_names(tmp_path: Path) -> None:
    write_files(tmp_path, OTHER_NAMES | NO_JSON_LINES)
    kinds = {file.name: file.kind for file in find(tmp_path).files}
    assert kinds == dict.fromkeys(OTHER_NAMES, "jsonl") | dict.fromkeys(NO_JSON_LINES, "text")
    for address in (tmp_path, tmp_path / "**"):
        found = find(address, format="jsonl")
        assert [file.name for file in found.files] == sorted(OTHER_NAMES)
        assert found.ignored.total() == len(NO_JSON_LINES)
    assert texts(read(one_file(tmp_path / "b.jl"))) == ["one", "two"]


def test_the_text_key_decides_about_a_single_line(tmp_path: Path) -> None:
    path = tmp_path / "wiki_07"
    path.write_bytes(b'{"body": "the last article"}\n')
    for text_key, kind in (("text", "text"), ("body", "jsonl")):
        assert kinds_of(find(path, text_key=text_key)) == {kind: 1}


BINARY = {
    "a.pdf": b"%PDF-1.4\nstream\n" + bytes(range(128)),
    "b.bin": b"".join(id_.to_bytes(2, "little") for id_ in range(100)),
    "c": bytes([1, 2, 3, 14, 15, 60, 61, 62]),
    "d.txt": "words".encode("utf-16"),
    "e.txt.gz": gzip.compress(b"a\0"),
}
TEXT = {
    "man.txt": b"N\bNA\bAM\bME\bE\n\x1b[1mbold\x1b[0m\n",
    "code.py": b"import os\n\x0c\n\x0b\nclass A: pass\n",
    "stray.txt": b"a stray \x01 control character is kept",
    "empty": b"",
}


def test_files_that_are_binary_are_not_read_as_text(tmp_path: Path) -> None:
    files = find(write_files(tmp_path, BINARY | TEXT)).files
    kinds = {file.name: file.kind for file in files}
    assert kinds == dict.fromkeys(BINARY, "binary") | dict.fromkeys(TEXT, "text")
    for file in files:
        (record,) = read(file)
        assert isinstance(record, Reject) == (file.name in BINARY), file.name
    assert kinds_of(find(tmp_path, format="text")) == {"text": len(files)}
    assert texts(read(one_file(tmp_path / "a.pdf", "text"))) == [BINARY["a.pdf"].decode()]


@pytest.mark.parametrize("format", ["auto", "lines", "wikitext"])
def test_nul_after_the_first_bytes_rejects_the_document_with_its_place(
    tmp_path: Path, format: str
) -> None:
    text = b" = Title = \n" + b"words\n" * 20_000
    (tmp_path / "in.txt").write_bytes(text + b"x\0y\n")
    *good, reject = read(one_file(tmp_path / "in.txt", format))
    assert len(good) == (20_001 if format == "lines" else 0)
    assert isinstance(reject, Reject)
    assert "binary: it has a NUL byte" in reject.reason
    assert reject.byte == len(text) + 1


@pytest.mark.parametrize("name", ["train.bin", "a.npy.gz"])
def test_ids_that_are_read_as_text_are_answered_by_the_options_for_ids(
    tmp_path: Path, name: str
) -> None:
    raw = bytes(range(256)) * 2
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    reason = only_reject(tmp_path / name).reason
    assert "give --format ids --vocab-size" in reason
    assert "UTF-16" not in reason


def test_binary_files_are_refused_by_name(txl: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_files(tmp_path / "in", {"a.pdf": BINARY["a.pdf"], "b.txt": "text"})
    ended = txl("prepare", folder, "--out", tmp_path / "out")
    assert ended.code == 3
    assert "\n  a.pdf:" in ended.err
    assert "--format text" in ended.err
    ended = txl("prepare", folder, "--out", tmp_path / "out", "--max-reject-rate", 0.5)
    assert ended.code == 0, ended.err
    assert "reading as binary: 1 .pdf; text: 1 .txt" in ended.err
    assert json.loads((tmp_path / "out" / "rejects.jsonl").read_text())["file"] == "a.pdf"


REMOVED: dict[str, tuple[str, bytes, str]] = {
    "a web archive": ("CC-MAIN.warc.wet.gz", gzip.compress(b"WARC/1.0\r\n"), "as JSON lines"),
    "one that was renamed": ("pages", b"WARC/1.0\r\n", "as JSON lines"),
    "a shard of llm.c": ("a.bin", struct.pack("<3i", 20240520, 1, 4), "tail -c +1025"),
    "one of Llama 3": ("a.bin.gz", gzip.compress(struct.pack("<2i", 20240801, 7)), "tail -c +1025"),
}


@pytest.mark.parametrize(("name", "content", "instead"), REMOVED.values(), ids=REMOVED)
def test_an_input_that_would_be_misread_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, instead: str
) -> None:
    """Also in a folder, where unknown files are ignored. As ids, the headers of llm.c are valid."""
    write_files(tmp_path / "in", {name: content})
    ids = IdRules(2**16, 0, "<u2") if ".bin" in name else None
    for address in (tmp_path / "in", tmp_path / "in" / name):
        place = re.escape(f"{tmp_path}/in/{name}")
        with pytest.raises(DataError, match=f"{place} (is|has) an?") as refused:
            one_file(address, "ids" if ids else "auto", ids)
        assert instead in str(refused.value)
