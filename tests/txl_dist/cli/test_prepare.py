"""The command line of `txl prepare`: options, inputs, output, and the how-to of token ids."""

# ruff: noqa: F811 - a test names an imported fixture as its parameter

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.manifest import load_manifest
from tests.data_pipeline.conftest import corpus, txl  # noqa: F401 - fixtures
from tests.data_pipeline.preparation.preparing import texts_of
from tests.support.commands import run_txl
from tests.support.commands import txl as run_command

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "how_to" / "prepare_token_ids.md"
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


IDS = ("--format", "ids", "--vocab-size", 5, "--end-of-document", 0)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--format", "feather"), "--format 'feather': "),
        (("--tokenizer", "no-such-kind"), "neither byte, char, word or bpe nor a file"),
        (("--tokenizer", "ids"), "neither byte, char, word or bpe nor a file"),
        (("--recipe", "wt104"), "--recipe 'wt104': "),
        (("--vocab-size", 300), "--vocab-size 300: "),
        (("--split", "valid"), "--split 'valid': expected NAME=FRACTION"),
        (("--split", "valid=0"), "--split "),
        (("--split", "valid=0.5,test=0.5"), "--split "),
        (("--split", "valid=0.1,valid=0.1"), "has a name twice"),
        (("--split", "train=0.1"), "--split "),
        (("--split", "../x=0.1"), "--split "),
        (("--split", "valid=nan"), "--split "),
        (("--shuffle", -1), "--shuffle -1: "),
        (("--max-reject-rate", "nan"), "Invalid value for '--max-reject-rate'"),
        (("--shard-size", 0), "--shard-size 0: "),
        (("--dedup", "fuzzy"), "--dedup 'fuzzy': "),
        (("--on", "the-moon"), "--on the-moon is neither"),
        ((*IDS[:2], *IDS[4:]), "--vocab-size: format ids needs the number"),
        (IDS[:4], "--end-of-document: format ids needs the id"),
        ((*IDS[:-1], 5), "is not in the vocabulary of 5 ids. To add it, give vocab-size 6"),
        ((*IDS[:-1], "End"), "--end-of-document 'End' is no token id, and no name of one; give"),
        ((*IDS, "--tokenizer", "byte"), "--tokenizer 'byte': format ids has token ids"),
        ((*IDS, "--padding", 5), "--padding 5: is not in the vocabulary of 5 ids"),
        ((*IDS, "--dtype", "float32"), "--dtype 'float32'"),
        ((*IDS, "--recipe", "wt103"), "--recipe 'wt103': wt103 is for tokenizer word"),
        (IDS[4:], "--end-of-document 0: is for format ids"),
        (
            ("--text-key", "body"),
            "--text-key 'body': no file of the input has keys or columns, it is",
        ),
        (("--names", "names.json"), "--names is for --format ids"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    tmp_path: Path, options: tuple[object, ...], cause: str
) -> None:
    (tmp_path / "in.txt").write_text("text")
    code, message = run_txl("prepare", tmp_path / "in.txt", "--out", tmp_path / "out", *options)
    assert (code, cause in message) == (2, True), message
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


# --- token ids ------------------------------------------------------------------------------------


def test_a_vocabulary_comes_from_names_or_from_the_tokenizer_of_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"ids": [4, 2, 3, 3]}\n')
    (tmp_path / "names.json").write_text('["Pad", "Start", "Bar"]')
    first, again, texts = (tmp_path / name for name in ("first", "again", "texts"))
    named = ("--names", tmp_path / "names.json", "--padding", "3", "--vocab-size", 5)
    prepare = ("prepare", tmp_path / "in.jsonl", "--out")
    code, message = run_txl(*prepare, first, "--format", "ids", *named, "--end-of-document", "Bra")
    assert (code, "'Bra' is no token id, and no name of one" in message) == (2, True)
    code, message = run_txl(*prepare, first, "--format", "ids", *named, "--end-of-document", "Pad")
    assert code == 0, message
    tokenizer = ("--tokenizer", first / "tokenizer.json")
    code, message = run_txl(*prepare, again, *tokenizer, "--vocab-size", 6)
    assert (code, "--vocab-size 6: the file of --tokenizer has 5; omit it" in message) == (2, True)
    options = *tokenizer, "--end-of-document", "Pad", *named[:4]
    code, message = run_txl(*prepare, again, *options)
    assert code == 0
    assert (again / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    shown = run_txl("data", "inspect", again, "--documents", 1)[1]
    assert "4 Bar" in shown
    assert "bytes of text" not in shown + message
    split = json.loads(run_txl("data", "inspect", again, "--json")[1])["splits"]["train"]
    assert (split["text_bytes"], split["text_bytes_per_compressed_byte"]) == (None, None)
    (tmp_path / "names.json").write_text('["Pad", "Start", "Beat"]')
    code, message = run_txl(*prepare, again, *tokenizer, *named[:4])
    assert (code, "tokenizer: the text of some ids" in message) == (3, True)
    (tmp_path / "in.txt").write_text("text")
    assert run_txl("prepare", tmp_path / "in.txt", "--out", texts)[0] == 0
    code, message = run_txl(
        *prepare, tmp_path / "out", *IDS, "--tokenizer", texts / "tokenizer.json"
    )
    assert (code, "takes only the tokenizer.json of a vocabulary of ids" in message) == (2, True)


@pytest.mark.slow
def test_the_example_with_music_works_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text("utf-8")
    (melodies,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    prepare, others = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [prepare.replace("\\\n", ""), *others.splitlines()]
    monkeypatch.chdir(tmp_path)
    exec(melodies, {})
    shown = {}
    for line in lines:
        name, *words = shlex.split(line)
        assert name == "txl"
        ended = run_command(*words, cwd=tmp_path, timeout_seconds=280)
        assert ended.returncode == 0, ended.stderr
        shown[words[0]] = ended.stdout
    assert "Bar Pitch_" in shown["data"]
    assert "perplexity" in shown["eval"]
    assert "bits per byte" not in shown["eval"]
    assert shown["generate"].startswith("Bar Pitch_62 Duration_1 Bar")
    assert not re.sub(r"\b(Bar|Duration_1|Pitch_\d+)\b", "", shown["generate"]).strip()
    code, message = run_txl("generate", "runs/songs", "--prompt", "Bar Pitch_128")
    assert code == 2
    assert "'Pitch_128' is not a token id" in message
