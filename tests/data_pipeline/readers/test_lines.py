"""Documents of text files: lines, blank lines and JSON lines. Ranges: test_formats.py."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.readers import Reject
from tests.data_pipeline.readers.reading import one_file, read, texts

BOM = b"\xef\xbb\xbf"

LINE = st.one_of(
    st.sampled_from([b"", b" ", b"\r", BOM, b"\xff", b" = T = ", b" = = S = = ", b'{"text": 3}']),
    st.text(max_size=9).map(lambda text: json.dumps({"text": text}).encode()),
    st.binary(max_size=6),
)

ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])

CONTENT = st.tuples(
    st.sampled_from([b"", BOM]), st.lists(st.tuples(LINE, ENDS).map(b"".join), max_size=9), LINE
).map(lambda parts: parts[0] + b"".join(parts[1]) + parts[2])


def test_every_line_that_is_not_empty_is_a_document_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(BOM + b"one\r\n\n two \x1b\x0c\r\r\n\r\n \nthree")
    records = read(one_file(path, "lines"))
    assert texts(records) == ["one", " two \x1b\x0c\r", " ", "three"]
    assert [record.line for record in records] == [1, 3, 5, 6]


@settings(max_examples=60, deadline=None)
@given(content=CONTENT)
def test_every_byte_of_lines_is_in_a_document_or_rejected_or_an_end(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """Against the standard library's cutting of the same bytes."""
    path = tmp_path_factory.mktemp("lines") / "in"
    path.write_bytes(content)
    expected = []
    for line, raw in enumerate(content.removeprefix(BOM).split(b"\n"), start=1):
        last = line == content.count(b"\n") + 1
        body = raw if last else raw.removesuffix(b"\r")
        if body:
            try:
                expected.append((line, body.decode() if b"\0" not in body else None))
            except UnicodeDecodeError:
                expected.append((line, None))
    records = read(one_file(path, "lines"))
    assert [(record.line, getattr(record, "text", None)) for record in records] == expected


BLOCK_LINE = st.sampled_from(["a", "word  ", "é", " ", "", "\t", "x" * 30])


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(BLOCK_LINE, max_size=20),
    end=st.sampled_from(["\n", "\r\n"]),
    has_last_end=st.booleans(),
)
def test_blank_lines_separate_documents(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, has_last_end: bool
) -> None:
    content = end.join(lines) + end * has_last_end
    numbered = enumerate(re.findall(r"[^\n]*\n|[^\n]+", content), start=1)
    groups = groupby(numbered, key=lambda line: bool(line[1].strip()))
    expected = [list(group) for is_text, group in groups if is_text]
    path = tmp_path_factory.mktemp("blocks") / "in.txt"
    path.write_bytes(BOM + content.encode())
    records = read(one_file(path, "blank_lines"))
    assert texts(records) == ["".join(text for _, text in group) for group in expected]
    assert [record.line for record in records] == [group[0][0] for group in expected]


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_a_key_twice_in_an_object_is_named(tmp_path: Path) -> None:
    lines = b'{"text": "a", "x": {"k": 1, "k": 1}}\n{"text": "b", "text": "c"}\n'
    (tmp_path / "in.jsonl").write_bytes(lines + jsonl("d"))
    one, two, _ = read(one_file(tmp_path / "in.jsonl"))
    assert isinstance(one, Reject)
    assert 'key "k" twice' in one.reason
    assert isinstance(two, Reject)
    assert (two.line, two.byte) == (2, 37)
    assert 'key "text" twice' in two.reason
