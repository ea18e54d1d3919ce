"""Files of prompts: lines and JSON lines; a bad line is named."""

from pathlib import Path

import pytest

from txl_dist.errors import DataError
from txl_dist.generation.prompt_file import PromptLine, read_prompts


def write(directory: Path, name: str, content: bytes) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def test_every_line_is_a_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", '\ufeffOnce\r\n{"prompt": 1}\n  two'.encode())
    assert read_prompts(path) == [
        PromptLine(1, "Once"),
        PromptLine(2, '{"prompt": 1}'),
        PromptLine(3, "  two"),
    ]


def test_json_lines_can_have_line_ends_and_be_empty(tmp_path: Path) -> None:
    content = (
        b'{"prompt": "a\\nb", "id": 3}\n{"text": ""}\n{"text": "no", "prompt": "yes"}\n'
        b'{"ids": [5, 6]}\n{"ids": [], "text": "no ids"}\n'
    )
    path = write(tmp_path, "p.jsonl", content)
    prompts = [line.prompt for line in read_prompts(path)]
    assert prompts == ["a\nb", "", "yes", [5, 6], "no ids"]


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("p.txt", b"  ", "blank"),
        ("p.txt", b"a\xff", "byte 1 is not UTF-8"),
        ("p.jsonl", b"", "blank"),
        ("p.jsonl", b'{"prompt": "x"', "broken JSON"),
        ("p.jsonl", b'{"prompt": "x", "prompt": "y"}', "twice"),
        ("p.jsonl", b'["x"]', 'a key "prompt", "text" or "ids"'),
        ("p.jsonl", b'{"Prompt": "x"}', 'a key "prompt", "text" or "ids"'),
        ("p.jsonl", b'{"ids": "5 6"}', '"ids" is not a list but str'),
        ("p.jsonl", b'{"prompt": 5}', "not a string but int"),
        ("p.jsonl", b'{"text": "\\ud800"}', "lone surrogate"),
        ("p.jsonl", b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, bad: bytes, reason: str) -> None:
    good = b'{"prompt": "fine"}'
    path = write(tmp_path, name, good + b"\n" + bad + b"\n" + good + b"\n")
    with pytest.raises(DataError, match=f"{name}, line 2: .*{reason}"):
        read_prompts(path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt: the prompts cannot be read"):
        read_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="is empty"):
        read_prompts(write(tmp_path, "p.txt", b""))
