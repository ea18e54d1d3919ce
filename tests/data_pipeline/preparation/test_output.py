"""Unusable input and an output directory that is not empty: exit code, place, cause, next step.

Finished units are reused if input, settings and tokenizer are the same and the files intact.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from data_pipeline.errors import DataError
from data_pipeline.preparation.documents import RECORDS
from data_pipeline.preparation.output import (
    FINGERPRINT,
    FinishedFile,
    load_finished,
    record_finished,
)
from data_pipeline.shards.data_commands import excerpts
from data_pipeline.shards.manifest import PrepareSettings, load_manifest
from data_pipeline.system.files import STAGING
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from tests.data_pipeline.preparation.preparing import (
    SETTINGS,
    compressed,
    files_of,
    prepare,
    stop_after,
    texts_of,
    write_corpus,
)
from tests.support.corpus_layouts import write_files

Txl = Callable[..., Any]


GOOD = b'{"text": "good"}\n'
BAD_LINES: dict[str, tuple[bytes, int, int | None, str]] = {
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
BAD_FILES: dict[str, tuple[bytes, int, int | None, str]] = {
    "text, invalid UTF-8": (b"good \xc3\x28", 0, 5, "invalid UTF-8"),
    "invalid UTF-8 behind a mark": (b"\xef\xbb\xbfgo\xff", 0, 5, "invalid UTF-8"),
    "half a character at the end": ("né".encode()[:-1], 0, 1, "invalid UTF-8"),
    "UTF-16": ("words".encode("utf-16"), 0, None, "iconv -f UTF-16"),
    "an encoded surrogate": (b"\xed\xa0\x80", 0, 0, "invalid UTF-8"),
    "nothing": (b"", 0, None, "holds no text"),
    "only a mark": (b"\xef\xbb\xbf", 0, None, "holds no text"),
}


@pytest.mark.fault_row(47)
@pytest.mark.parametrize("kind", [*BAD_LINES, *BAD_FILES])
def test_a_bad_line_fails_with_its_file_line_byte_and_cause(
    txl: Txl, tmp_path: Path, kind: str
) -> None:
    content, line, byte, cause = (BAD_LINES | BAD_FILES)[kind]
    source, out = tmp_path / ("in.jsonl" if line else "in.txt"), tmp_path / "out"
    source.write_bytes(content)
    ended = txl("prepare", source, "--out", out)
    assert (ended.code, ended.out) == (3, "")
    assert cause in ended.err
    if cause == "holds no text":
        assert not out.exists()
        return
    assert f"{source.name}:{line}:byte " * bool(line) in ended.err
    assert "run this again" in ended.err
    listed = json.loads((out / "rejects.jsonl").read_text())
    assert (listed["file"], listed["line"] or 0) == (source.name, line)
    assert byte is None or listed["byte"] == byte
    assert cause in listed["reason"]
    assert [path.name for path in out.iterdir()] == ["rejects.jsonl"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing", "no such file"),
        ("empty", "no text in it"),
        ("hidden", "no text in it"),
        ("pictures", "no text in it (ignored: 1 .png)"),
        ("link", "a broken link"),
        ("circle", "a broken link"),
        ("fifo", "not a regular file"),
    ],
)
def test_an_input_without_text_is_refused_and_no_output_is_made(
    txl: Txl, tmp_path: Path, name: str, cause: str
) -> None:
    (tmp_path / "empty").mkdir()
    write_files(tmp_path, {"hidden/.secret": "x", "pictures/a.png": b"\x89PNG"})
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "fifo")
    ended = txl("prepare", tmp_path / name, "--out", tmp_path / "out")
    assert ended.code == 3
    assert cause in ended.err
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("option", "value", "cause"),
    [
        ("--out", "in", "all files are in the directory of --out, which is not read."),
        ("--format", "parquet", "(ignored: 1 .txt). --format parquet reads only .parquet, .pq."),
        ("--tokenizer", "ids.json", "--format ids (or a --tokenizer of ids) reads only .jsonl,"),
    ],
)
def test_the_option_that_leaves_out_all_files_is_named(
    txl: Txl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, cause: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"in/a.txt": "x", "ids.json": IdTokenizer(9, 0, {}).to_json()})
    ended = txl("prepare", "in", "--out", "out", option, value)
    assert (ended.code, cause in ended.err) == (3, True), ended.err


def test_no_higher_rate_is_advised_if_no_record_can_be_used(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{broken\n" * 3)
    words = ("prepare", tmp_path / "in.jsonl", "--out", tmp_path / "out")
    for rate in (0.5, 1):
        ended = txl(*words, "--max-reject-rate", rate)
        assert ended.code == 3
        assert "3 of 3 records cannot be used, and none is left" in ended.err
        assert "max-reject-rate" not in ended.err


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
    lines.remove("{broken")
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    assert txl("prepare", tmp_path / "in.jsonl", "--out", out).code == 3, "another dataset"
    failed = tmp_path / "failed"
    failed.mkdir()
    (out / "rejects.jsonl").rename(failed / "rejects.jsonl")
    assert txl("prepare", tmp_path / "in.jsonl", "--out", failed).code == 0
    assert not (failed / "rejects.jsonl").exists()


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


def test_empty_documents_are_skipped_and_counted(txl: Txl, tmp_path: Path) -> None:
    lines = '{"text": ""}\n\n{"text": "line"}\n'
    folder = write_files(tmp_path / "in", {"a.txt": "", "b.txt": "text", "c.jsonl": lines})
    ended = txl("prepare", folder, "--out", tmp_path / "out", "--json")
    assert json.loads(ended.out)["input"]["empty"] == 2
    assert texts_of(tmp_path / "out") == {"b.txt": "text", "c.jsonl:3": "line"}


def test_files_without_a_byte_are_named(txl: Txl, tmp_path: Path) -> None:
    files = {"a.json": "", "b.txt": "", "c.jsonl": "", "d.txt": "text"}
    folder = write_files(tmp_path / "in", files)
    ended = txl("prepare", folder, "--out", tmp_path / "out")
    assert ended.code == 0
    assert "2 of 4 files have 0 bytes: a.json, c.jsonl\n" in ended.err
    assert "skipped documents: 1 empty" in ended.out, "b.txt"
    ids = ("--format", "ids", "--vocab-size", 9, "--end-of-document", 0)
    ended = txl("prepare", folder / "a.json", "--out", tmp_path / "ids", *ids)
    assert ended.code == 3
    assert "a.json:byte 1: broken JSON" in ended.err


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
        out = write_files(tmp_path / f"out-{name}", {name: "mine"})
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


# --- finished work units ------------------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 7, 28])
def test_a_rerun_reuses_all_that_was_finished(lines: Path, tmp_path: Path, units: int) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(lines, whole, 500)
    stop_after(units, lines, out)
    assert [path.name for path in out.iterdir()] == [".staging.tmp"]
    stop_after(0, lines, out)  # stopped before it found anything finished
    assert prepare(lines, out, 500).reused_units == units
    assert files_of(out) == files_of(whole)


@pytest.mark.parametrize("name", ["units/input-000001.scan.safetensors", "train-000000.tar.zst"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_finished_file_that_was_damaged_is_made_again(
    lines: Path, tmp_path: Path, name: str, damage: str
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(lines, whole, 500)
    stop_after(31, lines, out)
    path = out / ".staging.tmp" / name
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-1])
    if damage == "missing":
        path.unlink()
    assert prepare(lines, out, 500).reused_units == 30
    assert files_of(out) == files_of(whole)


def test_a_record_counts_only_for_the_unit_that_it_was_written_for(tmp_path: Path) -> None:
    (tmp_path / RECORDS).mkdir()
    (tmp_path / "a").write_bytes(b"abc")
    sums = [FinishedFile("a", 3, hashlib.sha256(b"abc").hexdigest())]
    record_finished(tmp_path, "unit", "key", result={"tokens": 1}, files=sums)
    assert load_finished(tmp_path, "unit", "key") == {"tokens": 1}
    assert load_finished(tmp_path, "unit", "another key") is None
    (tmp_path / RECORDS / "unit.json").write_text('{"key": "key", "files": [')
    assert load_finished(tmp_path, "unit", "key") is None


OPTIONS = {"shuffle": 5, "split": {"valid": 0.3}, "shard_bytes": 700, "block_bytes": 512}


def test_finished_work_of_another_tokenizer_file_is_not_used(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", ["one", "two"] * 9)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(paths, ("one two", "three four"), strict=True):
        char = train_tokenizer(PrepareSettings(tokenizer="char"), lambda text=text: iter([text]))
        path.write_text(char.to_json())
    options = {"settings": PrepareSettings(tokenizer="file", **OPTIONS)}
    out, notes = tmp_path / "out", []
    stop_after(5, tmp_path / "in", out, 99, tokenizer_file=paths[0], **options)
    done = prepare(tmp_path / "in", out, 99, tokenizer_file=paths[1], note=notes.append, **options)
    assert "discarding the unfinished work" in notes[1]
    assert done.reused_units == 0
    assert load_manifest(out).tokenizer_digest == load_tokenizer(paths[1]).digest
    with pytest.raises(DataError, match="holds another dataset: tokenizer: "):
        prepare(tmp_path / "in", out, 99, tokenizer_file=paths[0], **options)
    assert prepare(tmp_path / "in", out, 99, tokenizer_file=paths[1], **options).already_complete


def test_finished_work_of_other_settings_or_input_is_discarded(lines: Path, tmp_path: Path) -> None:
    out, notes = tmp_path / "out", []
    stop_after(7, lines, out)
    other = SETTINGS.model_copy(update={"shuffle": 4})
    stop_after(5, lines, out, settings=other, note=notes.append)
    (lines / "small.txt").write_text("another")
    stop_after(5, lines, out, settings=other, note=notes.append)
    (out / STAGING / RECORDS / FINGERPRINT).write_bytes(b"\xff")
    assert prepare(lines, out, 500, settings=other, note=notes.append).reused_units == 0
    assert ["discarding the unfinished work" in note for note in notes] == [False, True] * 3


def test_finished_work_of_files_of_the_same_name_size_and_time_elsewhere_is_not_reused(
    tmp_path: Path,
) -> None:
    one = compressed(tmp_path / "one" / "a.txt.gz", "abcd")
    two = compressed(tmp_path / "two" / "a.txt.gz", "dcba")
    assert one.stat().st_size == two.stat().st_size
    out, settings = tmp_path / "out", PrepareSettings()
    stop_after(1, one, out, settings=settings)
    assert prepare(two, out, 500, settings=settings).reused_units == 0
    assert excerpts(out, documents=1)[0].text == "dcba"
