"""Token ids by the command line, and the example of docs/how_to/prepare_token_ids.md as printed."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import run_txl, txl

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "how_to" / "prepare_token_ids.md"
OPTIONS = ("--format", "ids", "--vocab-size", 5, "--end-of-document", 0)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--format", "ids", "--end-of-document", 0), "--vocab-size: format ids needs the number"),
        (("--format", "ids", "--vocab-size", 5), "--end-of-document: format ids needs the id"),
        ((*OPTIONS[:-1], 5), "is not in the vocabulary of 5 ids. To add it, give vocab-size 6"),
        ((*OPTIONS, "--tokenizer", "byte"), "--tokenizer 'byte': format ids has token ids"),
        (
            (*OPTIONS[:-1], "End"),
            "--end-of-document 'End' is no token id, and no name of one; give",
        ),
        ((*OPTIONS, "--padding", 5), "--padding 5: is not in the vocabulary of 5 ids"),
        (("--padding", 0), "--padding 0: is for format ids"),
        ((*OPTIONS, "--dtype", "float32"), "--dtype 'float32'"),
        ((*OPTIONS, "--recipe", "wt103"), "--recipe 'wt103': wt103 is for tokenizer word"),
        (("--end-of-document", 0), "--end-of-document 0: is for format ids"),
        (("--names", "names.json"), "--names is for --format ids"),
        (("--dtype", "uint16"), "--dtype 'uint16': is for format ids"),
        (("--tokenizer", "ids"), "neither byte, char, word or bpe nor a file"),
    ],
)
def test_wrong_options_are_refused_by_name(
    tmp_path: Path, options: tuple[object, ...], cause: str
) -> None:
    code, message = run_txl("prepare", tmp_path / "in", "--out", tmp_path / "out", *options)
    assert (code, cause in message) == (2, True), message


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
        *prepare, tmp_path / "out", *OPTIONS, "--tokenizer", texts / "tokenizer.json"
    )
    assert (code, "takes only the tokenizer.json of a vocabulary of ids" in message) == (2, True)


@pytest.mark.slow
def test_the_example_with_music_works_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text("utf-8")
    (melodies,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    prepare, others = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [prepare.replace("\\\n", ""), *others.splitlines()]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.yaml").write_bytes(
        (REPOSITORY / "configs" / "tiny.yaml").read_bytes()
    )
    monkeypatch.chdir(tmp_path)
    exec(melodies, {})
    shown = {}
    for command in commands:
        name, *words = shlex.split(command)
        assert name == "txl"
        ended = txl(*words, cwd=tmp_path, timeout_seconds=280)
        assert ended.returncode == 0, ended.stderr
        shown[words[0]] = ended.stdout
    assert "Bar Pitch_" in shown["data"]
    assert "perplexity" in shown["eval"]
    assert "bits per byte" not in shown["eval"]
    assert shown["generate"].startswith("Bar Pitch_62 Duration_1 Bar")
    assert set(shown["generate"].split()) <= {
        "Bar",
        "Duration_1",
        *(f"Pitch_{n}" for n in range(128)),
    }
    code, message = run_txl("generate", "runs/songs", "--prompt", "Bar Pitch_128")
    assert code == 2
    assert "'Pitch_128' is not a token id" in message
