"""Text of tokens: complete characters one at a time, and the cut before a stop string.

Files of prompts: lines and JSON lines; a bad line is named.
"""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, train_tokenizer
from tests.support.hypothesis_examples import examples
from txl_dist.errors import DataError
from txl_dist.generation.text import (
    StopStrings,
    TextDecoder,
    TextLimits,
    read_prompts,
    stream_text,
)


def streamed(data: bytes, *stop: str) -> list[str]:
    limits = TextLimits(max_tokens=len(data) + 1, stop=stop)
    return list(stream_text(iter(data), ByteTokenizer(), limits))


@examples(100)
@given(text=st.text(max_size=30))
def test_text_is_yielded_one_complete_character_at_a_time(text: str) -> None:
    assert streamed(text.encode()) == list(text)


@examples(100)
@given(data=st.binary(max_size=30))
def test_invalid_utf8_is_replaced_and_other_text_is_unchanged(data: bytes) -> None:
    assert "".join(streamed(data)) == data.decode(errors="replace")


def test_an_incomplete_last_character_is_replaced() -> None:
    assert streamed("潮".encode()[:2]) == ["\N{REPLACEMENT CHARACTER}"]


def test_the_end_of_document_token_has_no_text() -> None:
    tokenizer = ByteTokenizer()
    decoder, tokens = TextDecoder(tokenizer), [ord("a"), tokenizer.end_of_document, ord("b")]
    assert [decoder.add(token) for token in tokens] == ["a", "", "b"]


def test_words_are_separated_also_from_the_prompt() -> None:
    settings = PrepareSettings(tokenizer="word")
    tokenizer = train_tokenizer(settings, lambda: iter(["the cat sat\nthe end"]))
    first, *others = tokenizer.encode("the cat\nthe end").tolist()
    texts = list(stream_text(iter([first, *others]), tokenizer, TextLimits()))
    assert texts == ["the", " cat", "\n", "the", " end"]
    limits = TextLimits()
    assert "".join(stream_text(iter(others), tokenizer, limits, after=first)) == " cat\nthe end"


# --- stop strings -------------------------------------------------------------------------------


def cut(parts: list[str], stop: list[str]) -> tuple[str, str | None]:
    strings = StopStrings(stop)
    text = ""
    for part in parts:
        text += strings.add(part)
        if strings.found:
            break
    return text + strings.close(), strings.found


def cut_by_definition(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete, of several at the same place the longest."""
    for end in range(len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@examples(200)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=6),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@example(parts=["xab"], stop=["b", "ab"])
def test_the_cut_does_not_depend_on_how_the_text_arrives(parts: list[str], stop: list[str]) -> None:
    assert cut(parts, stop) == cut_by_definition("".join(parts), stop)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    strings = StopStrings(["ab\n", "bc"])
    assert [strings.add(part) for part in ("xa", "b", "a", "y")] == ["x", "", "ab", "ay"]
    text = b"one\ntwo\n\nthree"
    assert "".join(streamed(text, "\n\n", "four")) == "one\ntwo"
    assert "".join(streamed(text, "\n\n\n")) == text.decode()
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["x", ""])


def write(directory: Path, name: str, content: bytes) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def test_every_line_is_a_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", '\ufeffOnce\r\n{"prompt": 1}\n  two'.encode())
    assert read_prompts(path) == ["Once", '{"prompt": 1}', "  two"]


def test_json_lines_can_have_line_ends_and_be_empty(tmp_path: Path) -> None:
    content = (
        b'{"prompt": "a\\nb", "id": 3}\n{"text": ""}\n{"text": "no", "prompt": "yes", "seed": 1}\n'
        b'{"ids": [5, 6]}\n{"ids": [], "text": "no ids"}\n'
    )
    path = write(tmp_path, "p.jsonl", content)
    assert read_prompts(path) == ["a\nb", "", "yes", [5, 6], "no ids"]


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("p.txt", b"  ", "blank"),
        ("p.txt", b"a\xff", "0xff in position 1"),
        ("p.jsonl", b"", "blank"),
        ("p.jsonl", b'{"prompt": "x"', "delimiter"),
        ("p.jsonl", b'{"prompt": "x", "prompt": "y"}', "twice"),
        ("p.jsonl", b'["x"]', 'a key "prompt", "text" or "ids"'),
        ("p.jsonl", b'{"Prompt": "x"}', 'a key "prompt", "text" or "ids"'),
        ("p.jsonl", b'{"ids": "5 6"}', '"ids" has the type str'),
        (
            "p.jsonl",
            b'{"prompt": "x", "max_tokens": 3}',
            '"max_tokens" is an option of all prompts',
        ),
        ("p.jsonl", b'{"prompt": 5}', '"prompt" has the type int'),
        ("p.jsonl", b'{"text": "\\ud800"}', "surrogates not allowed"),
        ("p.jsonl", b"[" * 100_000, "maximum recursion depth"),
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
    with pytest.raises(DataError, match="line 1: the line is blank"):
        read_prompts(write(tmp_path, "p.txt", b""))
