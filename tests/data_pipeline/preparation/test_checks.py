"""Unusable input and an output directory that is not empty: exit code, place, cause, next step."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from tests.data_pipeline.preparation.preparing import files_of, texts_of

Txl = Callable[..., Any]


GOOD = b'{"text": "good"}\n'


BAD_LINES = {
    "a broken line": (GOOD + b'{"text": }\n' + GOOD, 2, 17 + 9, "broken JSON"),
    "half a last line": (GOOD + b'{"text": "cut', 2, None, "truncated record"),
    "a list": (GOOD + b'["text"]\n', 2, 17, "not a JSON object but a list"),
    "null": (b"null\n", 1, 0, "not a JSON object"),
    "no text key": (b'{"body": "x", "id": 1}\n', 1, 0, 'no key "text"; keys seen: body, id'),
    "null text": (b'{"text": null}\n', 1, 0, '"text" is not a string but null'),
    "list text": (GOOD + b'{"text": ["x"]}\n', 2, 17, '"text" is not a string but list'),
    "a lone surrogate": (b'{"text": "ab\\ud800"}\n', 1, 0, "lone surrogate U+D800 at character 2"),
    "invalid UTF-8": (GOOD + b'{"text": "\xff"}\n', 2, 17 + 10, "invalid UTF-8: byte 0xff"),
    "deep nesting": (b"[" * 200_000 + b"\n", 1, 0, "unreadable JSON"),
    "a number of many digits": (b'{"text": ' + b"9" * 9999 + b"}\n", 1, 0, "unreadable JSON"),
}


@pytest.mark.fault_row(47)
@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_fails_with_its_file_line_byte_and_cause(
    txl: Txl, tmp_path: Path, kind: str
) -> None:
    content, line, byte, cause = BAD_LINES[kind]
    (tmp_path / "in.jsonl").write_bytes(content)
    out = tmp_path / "out"
    ended = txl("prepare", tmp_path / "in.jsonl", "--out", out)
    assert ended.code == 3
    assert f"in.jsonl:{line}:byte " in ended.err
    assert cause in ended.err
    assert "run this again" in ended.err
    listed = json.loads((out / "rejects.jsonl").read_text())
    assert (listed["file"], listed["line"]) == ("in.jsonl", line)
    assert byte is None or listed["byte"] == byte
    assert cause in listed["reason"]
    assert [path.name for path in out.iterdir()] == ["rejects.jsonl"]


BAD_FILES = {
    "invalid UTF-8": (b"good \xc3\x28", "byte 5: invalid UTF-8: byte 0xc3"),
    "invalid UTF-8 behind a mark": (b"\xef\xbb\xbfgo\xff", "byte 5: invalid UTF-8"),
    "half a character at the end": ("né".encode()[:-1], "byte 1: invalid UTF-8"),
    "UTF-16": ("words".encode("utf-16"), "iconv -f UTF-16"),
    "an encoded surrogate": (b"\xed\xa0\x80", "byte 0: invalid UTF-8"),
    "nothing": (b"", "holds no text"),
    "only a mark": (b"\xef\xbb\xbf", "holds no text"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_single_bad_file_fails_with_its_byte_and_cause(
    txl: Txl, tmp_path: Path, kind: str
) -> None:
    content, cause = BAD_FILES[kind]
    (tmp_path / "in.txt").write_bytes(content)
    ended = txl("prepare", tmp_path / "in.txt", "--out", tmp_path / "out")
    assert ended.code == 3
    assert cause in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing", "no such file"),
        ("empty", "no text in this folder"),
        ("hidden", "no text in this folder"),
        ("pictures", "no text in this folder (ignored: 1 .png)"),
        ("link", "a broken link"),
        ("circle", "a broken link"),
        ("fifo", "not a regular file"),
    ],
)
def test_an_input_without_text_is_refused_and_no_output_is_made(
    txl: Txl, tmp_path: Path, name: str, cause: str
) -> None:
    for folder in ("empty", "hidden", "pictures"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hidden" / ".secret").write_text("x")
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "fifo")
    ended = txl("prepare", tmp_path / name, "--out", tmp_path / "out")
    assert ended.code == 3
    assert cause in ended.err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_rejects_below_the_limit_are_listed_and_left_out(txl: Txl, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(99)]
    lines.insert(40, "{broken")
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "out"
    assert txl("prepare", tmp_path / "in.jsonl", "--out", out).code == 3
    ended = txl("prepare", tmp_path / "in.jsonl", "--out", out, "--max-reject-rate", "0.01")
    assert ended.code == 0
    assert "1 records could not be used" in ended.err
    assert json.loads((out / "rejects.jsonl").read_text())["line"] == 41
    texts = texts_of(out)
    assert texts["in.jsonl:40"] == "document 39"
    assert texts["in.jsonl:42"] == "document 40"
    assert "in.jsonl:41" not in texts


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
def test_a_file_that_ends_early_is_accepted_only_with_rate_1(
    txl: Txl, tmp_path: Path, kind: str
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    lines = b"".join(b'{"text": "document %d"}\n' % number for number in range(999))
    (source / "a.jsonl").write_bytes(lines)
    broken = source / ("b.parquet" if kind == "parquet" else f"b.jsonl.{kind}")
    if kind == "parquet":
        parquet.write_table(pa.table({"text": ["x", "y"]}), broken)
    else:
        broken.write_bytes({"gz": gzip.compress, "zst": zstandard.compress}[kind](lines))
    broken.write_bytes(broken.read_bytes()[:-9])
    for rate in (0.001, 0.999):
        ended = txl("prepare", source, "--out", out, "--max-reject-rate", rate)
        assert ended.code == 3
        assert "1 of 2 files cannot be read to their end" in ended.err
        assert f"\n  {broken.name}:" in ended.err
        assert "--max-reject-rate 1" in ended.err
        (listed,) = (out / "rejects.jsonl").read_text().splitlines()
        assert json.loads(listed)["file"] == broken.name
        assert not (out / "manifest.json").exists()
    assert txl("prepare", source, "--out", out, "--max-reject-rate", 1).code == 0
    assert len(texts_of(out)) >= 999


def test_a_repaired_corpus_leaves_no_list_of_rejects(txl: Txl, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("{broken\n")
    assert txl("prepare", source, "--out", out).code == 3
    source.write_text('{"text": "whole"}\n')
    assert txl("prepare", source, "--out", out).code == 0
    assert not (out / "rejects.jsonl").exists()


def test_empty_documents_are_skipped_and_counted(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("")
    (tmp_path / "in" / "b.txt").write_text("text")
    (tmp_path / "in" / "c.jsonl").write_text('{"text": ""}\n\n{"text": "line"}\n')
    ended = txl("prepare", tmp_path / "in", "--out", tmp_path / "out", "--json")
    assert json.loads(ended.out)["input"]["empty"] == 2
    assert texts_of(tmp_path / "out") == {"b.txt": "text", "c.jsonl:3": "line"}


def test_files_without_a_byte_are_named(txl: Txl, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.json", "b.txt", "c.jsonl"):
        (folder / name).write_text("")
    (folder / "d.txt").write_text("text")
    ended = txl("prepare", folder, "--out", tmp_path / "out")
    assert ended.code == 0
    assert "2 of 4 files have 0 bytes: a.json, c.jsonl\n" in ended.err
    assert "skipped documents: 1 empty" in ended.out, "b.txt"
    ids = ("--format", "ids", "--vocab-size", 9, "--end-of-document", 0)
    ended = txl("prepare", folder / "a.json", "--out", tmp_path / "ids", *ids)
    assert ended.code == 3
    assert "a.json:byte 0: the file is empty" in ended.err


def test_an_empty_text_key_is_not_the_default(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    ended = txl("prepare", tmp_path / "in.jsonl", "--out", tmp_path / "out", "--text-key", "")
    assert ended.code == 3
    assert 'no key ""; keys seen: text' in ended.err


def test_a_second_run_finds_the_dataset_complete(txl: Txl, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = txl("prepare", corpus, "--out", out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    second = txl("prepare", corpus, "--out", out)
    assert (first.code, second.code) == (0, 0)
    assert "already complete" not in first.out
    assert "already complete" in second.out
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}


def test_another_dataset_in_the_output_is_refused_with_the_differences(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert txl("prepare", corpus, "--out", out, "--shuffle", "1").code == 0
    before = files_of(out)
    ended = txl("prepare", corpus, "--out", out, "--shuffle", "2", "--split", "valid=0.5")
    assert ended.code == 3
    assert "shuffle: 1 there, 2 now" in ended.err
    assert "split: {} there, {'valid': 0.5} now" in ended.err
    (corpus / "00.txt").write_text("other")
    ended = txl("prepare", corpus, "--out", out, "--shuffle", "1")
    assert ended.code == 3
    assert "input digest" in ended.err
    assert files_of(out) == before


def test_other_files_in_the_output_are_refused_and_unchanged(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    for name in ("notes.md", "train-000000.tar.zst", "rejects.jsonl"):
        out = tmp_path / f"out-{name}"
        out.mkdir()
        (out / name).write_text("mine")
        ended = txl("prepare", corpus, "--out", out)
        assert ended.code == 3
        assert name in ended.err
        assert files_of(out) == {name: b"mine"}


def test_a_dataset_that_lost_a_shard_is_not_called_complete(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert txl("prepare", corpus, "--out", out).code == 0
    (out / "train-000000.tar.zst").unlink()
    ended = txl("prepare", corpus, "--out", out)
    assert ended.code == 3
    assert "not train-000000.tar.zst" in ended.err
