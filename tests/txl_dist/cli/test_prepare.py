"""The command line of `txl prepare`: options, inputs, output."""

# ruff: noqa: F811 - a test names an imported fixture as its parameter

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.manifest import load_manifest
from tests.data_pipeline.conftest import corpus, txl  # noqa: F401 - fixtures
from tests.data_pipeline.preparation.preparing import texts_of

Txl = Callable[..., Any]


@pytest.mark.fault_row(47)
def test_every_character_is_kept_except_the_byte_order_mark_of_a_file(
    txl: Txl, tmp_path: Path
) -> None:
    text = "\ufeff" + "a\r\nb\x85c\u2028d\x0ce\x1bf <|endoftext|> \ufeff 😀"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(text.encode())
    line = json.dumps({"text": text[1:]})
    (tmp_path / "in" / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert txl("prepare", tmp_path / "in", "--out", tmp_path / "out").code == 0
    assert texts_of(tmp_path / "out") == {"a.txt": text[1:], "b.jsonl:1": text[1:]}
    with_nul = text[1:] + "\0"
    (tmp_path / "nul.txt").write_text(with_nul, newline="")
    nul = (tmp_path / "nul.txt", "--out", tmp_path / "out2")
    assert txl("prepare", *nul).code == 3
    assert txl("prepare", *nul, "--format", "text").code == 0
    assert texts_of(tmp_path / "out2") == {"nul.txt": with_nul}


def test_the_output_inside_the_input_is_not_read_as_input(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for _ in range(2):
        assert txl("prepare", tmp_path, "--out", tmp_path / "out").code == 0
    assert texts_of(tmp_path / "out") == {"a.txt": "a"}


def test_a_file_name_that_is_not_unicode_becomes_an_escaped_id(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/caf\xe9.txt")).write_text("a")
    assert txl("prepare", tmp_path / "in", "--out", tmp_path / "out").code == 0
    assert list(texts_of(tmp_path / "out")) == ["caf\\xe9.txt"]


def test_a_dataset_path_that_is_not_unicode_works(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a")
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for ended in (
        txl("prepare", tmp_path / "in.txt", "--out", out),
        txl("data", "verify", out),
        txl("data", "inspect", out),
    ):
        assert ended.code == 0
        assert r"caf\udce9: " in ended.out


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "feather"),
        ("--tokenizer", "no-such-kind"),
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
def test_an_invalid_option_exits_with_2(txl: Txl, tmp_path: Path, options: tuple[str, str]) -> None:
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
