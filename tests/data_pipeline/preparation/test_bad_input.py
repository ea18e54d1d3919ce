"""Every kind of bad input, through the command line: its exit code, place, cause and next step."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.preparation.scan import plan_scan, scan
from data_pipeline.readers import find_files
from data_pipeline.shards.inspection import excerpts
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.tokenizers import ByteTokenizer

Txl = Callable[..., Any]


def texts_of(directory: Path, split: str = "train") -> dict[str, str]:
    """Document id to text of a whole split."""
    source = open_split(directory, split)
    shown = excerpts(directory, documents=10**6)
    ids = [excerpt.document_id for excerpt in shown if excerpt.split == split]
    texts = []
    for block, count in enumerate(source.block_tokens.tolist()):
        starts = source.document_starts(block).tolist()
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            texts.append(ByteTokenizer().decode(source.read(block, start, stop)))
    return dict(zip(ids, texts, strict=True))


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
        ("link", "a link to nothing"),
        ("circle", "a link to nothing"),
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
def test_a_file_that_breaks_off_is_accepted_by_no_rate_but_1(
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


def test_memory_does_not_grow_with_the_number_of_rejects(tmp_path: Path) -> None:
    number = 20_000
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x\n" * number)
    files = find_files([str(source)], format="auto", exclude=tmp_path / "out").files
    units = plan_scan(files, "text")
    (found,) = (scan(unit) for unit in units)
    with (tmp_path / "rejects").open("wb") as listed:
        tracemalloc.start()
        corpus = InputIndex(files, units, listed)
        corpus.fill(lambda _: found)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert corpus.rejected == number
    assert kept < number
    assert len((tmp_path / "rejects").read_bytes().splitlines()) == number


def test_a_repaired_corpus_leaves_no_list_of_rejects(txl: Txl, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("{broken\n")
    assert txl("prepare", source, "--out", out).code == 3
    source.write_text('{"text": "whole"}\n')
    assert txl("prepare", source, "--out", out).code == 0
    assert not (out / "rejects.jsonl").exists()


def test_a_list_of_rejects_that_was_being_written_is_removed_and_nothing_else(
    txl: Txl, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("text")
    out.mkdir()
    left, foreign = out / ".rejects.jsonl.4711.tmp", out / ".rejects.jsonl.mine.tmp"
    left.write_text('{"file"')
    foreign.write_text("")
    ended = txl("prepare", source, "--out", out)
    assert ended.code == 3
    assert "do not belong to a dataset: .rejects.jsonl.mine.tmp." in ended.err
    assert left.exists(), "nothing was touched"
    foreign.unlink()
    assert txl("prepare", source, "--out", out).code == 0
    assert not left.exists()


def test_empty_documents_are_skipped_and_counted(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("")
    (tmp_path / "in" / "b.txt").write_text("text")
    (tmp_path / "in" / "c.jsonl").write_text('{"text": ""}\n\n{"text": "line"}\n')
    ended = txl("prepare", tmp_path / "in", "--out", tmp_path / "out", "--json")
    assert json.loads(ended.out)["input"]["empty"] == 2
    assert texts_of(tmp_path / "out") == {"b.txt": "text", "c.jsonl:3": "line"}


def test_every_character_is_kept_but_the_byte_order_mark_of_a_file(
    txl: Txl, tmp_path: Path
) -> None:
    text = "\ufeff" + "a\r\nb\x85c\u2028d\x0ce\x00f <|endoftext|> \ufeff 😀"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(text.encode())
    line = json.dumps({"text": text[1:]})
    (tmp_path / "in" / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert txl("prepare", tmp_path / "in", "--out", tmp_path / "out").code == 0
    assert texts_of(tmp_path / "out") == {"a.txt": text[1:], "b.jsonl:1": text[1:]}


def test_a_folder_is_read_once_through_loops_of_links(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "a.txt").write_text("a")
    (tmp_path / "in" / "sub" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "sub" / ".hidden.txt").write_text("h")
    (tmp_path / "in" / ".git").mkdir()
    (tmp_path / "in" / ".git" / "config.txt").write_text("h")
    assert txl("prepare", tmp_path / "in", "--out", tmp_path / "out").code == 0
    assert texts_of(tmp_path / "out") == {"sub/a.txt": "a"}


def test_the_output_inside_the_input_is_not_read_as_input(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for _ in range(2):
        assert txl("prepare", tmp_path, "--out", tmp_path / "out").code == 0
    assert texts_of(tmp_path / "out") == {"a.txt": "a"}


def test_a_file_name_that_is_no_unicode_becomes_an_escaped_id(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/caf\xe9.txt")).write_text("a")
    assert txl("prepare", tmp_path / "in", "--out", tmp_path / "out").code == 0
    assert list(texts_of(tmp_path / "out")) == ["caf\\xe9.txt"]


def test_a_dataset_whose_path_is_no_unicode_is_made_and_looked_at(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a")
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for ended in (
        txl("prepare", tmp_path / "in.txt", "--out", out),
        txl("data", "verify", out),
        txl("data", "inspect", out),
        txl("data", "rebuild", out),
    ):
        assert ended.code == 0
        assert r"caf\udce9: " in ended.out


def test_two_inputs_with_the_same_document_id_are_refused(txl: Txl, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    ended = txl("prepare", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "out")
    assert ended.code == 3
    assert "would both be document 'a.txt'" in ended.err


def test_another_text_key_is_read_when_asked_for(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "x", "text": 3}\n')
    out = tmp_path / "out"
    assert txl("prepare", tmp_path / "in.jsonl", "--out", out, "--text-key", "body").code == 0
    assert texts_of(out) == {"in.jsonl:1": "x"}


def test_the_format_decides_what_lines_are(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "in" / "b.txt").write_text("y")
    for format_, expected in (
        ("auto", {"a.jsonl:1": "x", "b.txt": "y"}),
        ("text", {"a.jsonl": '{"text": "x"}\n', "b.txt": "y"}),
        ("jsonl", {"a.jsonl:1": "x"}),
    ):
        out = tmp_path / format_
        assert txl("prepare", tmp_path / "in", "--out", out, "--format", format_).code == 0
        assert texts_of(out) == expected


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "arrow"),
        ("--tokenizer", "no-such-kind"),
        ("--recipe", "wt103"),
        ("--recipe", "wt104"),
        ("--vocab-size", "300"),
        ("--min-freq", "2"),
        ("--split", "valid"),
        ("--split", "valid=0"),
        ("--split", "valid=0.5,test=0.5"),
        ("--split", "valid=0.1,valid=0.1"),
        ("--split", "train=0.1"),
        ("--split", "../x=0.1"),
        ("--split", "valid=nan"),
        ("--shuffle", "-1"),
        ("--max-reject-rate", "2"),
        ("--max-reject-rate", "nan"),
        ("--shard-size", "0"),
        ("--workers-of-the-world", "1"),
        ("--workers", "0"),
        ("--dedup", "fuzzy"),
        ("--on", "the-moon"),
    ],
)
def test_an_option_that_cannot_be_meant_exits_with_2(
    txl: Txl, tmp_path: Path, options: tuple[str, str]
) -> None:
    (tmp_path / "in.txt").write_text("text")
    ended = txl("prepare", tmp_path / "in.txt", "--out", tmp_path / "out", *options)
    assert ended.code == 2
    assert options[0] in ended.err
    assert not (tmp_path / "out").exists()


def test_control_characters_of_a_corpus_do_not_reach_the_terminal(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\x1b[2J.txt").write_text("red \x1b[31m alert \x07 \u202e end\nline")
    out = tmp_path / "out"
    assert txl("prepare", tmp_path / "in", "--out", out).code == 0
    shown = txl("data", "inspect", out).out
    assert not any(character in shown for character in "\x1b\x07\u202e")
    assert r"red \x1b[31m alert \x07 \u202e end\nline" in shown
    assert r"a\x1b[2J.txt" in shown


def test_inspect_and_prepare_print_one_json_object(txl: Txl, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared = json.loads(txl("prepare", corpus, "--out", out, "--json").out)
    inspected = json.loads(txl("data", "inspect", out, "--documents", "3", "--json").out)
    verified = json.loads(txl("data", "verify", out, "--json").out)
    digest = load_manifest(out).digest
    assert prepared["digest"] == inspected["digest"] == verified["digest"] == digest
    assert prepared["splits"]["train"]["documents"] == 11
    assert len(inspected["documents"]) == 3
    assert inspected["documents"][0]["text"].startswith("[0] Gathering")
    assert inspected["splits"]["train"]["text_bytes_per_compressed_byte"] > 1
    assert verified["ok"] is True
