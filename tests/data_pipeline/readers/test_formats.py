"""What each format takes for a document, cut into any ranges, and read again."""

import hashlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline.readers import Record, Reject, read_again, read_text_chunks, scan_ranges
from data_pipeline.readers.records import HELD_BYTES
from data_pipeline.readers.source import CHUNK_BYTES, Source, read_line_chunks
from tests.data_pipeline.readers.reading import one_file, read, texts

BOM = b"\xef\xbb\xbf"
WIKI = (
    " \n = First = \n \n words of it \n = = A section = = \n more \n"
    " = E = M C 2 ( album ) = \r\n café \n = = = Deeper = = = \n = not a title \n"
)


def test_lines_are_documents_without_their_ends_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(BOM + b"one\r\n\n two \x00\x0c\r\r\n\r\n \nthree")
    found = read(one_file(path, "lines"))
    assert texts(found) == ["one", " two \x00\x0c\r", " ", "three"]
    places = [(record.line, record.offset, record.size) for record in found]
    assert places == [(1, 3, 3), (3, 9, 8), (5, 21, 1), (6, 23, 5)]


def test_articles_of_wikitext_begin_at_titles_and_not_at_sections(tmp_path: Path) -> None:
    path = tmp_path / "wiki.train.tokens"
    path.write_bytes(WIKI.encode())
    file = one_file(path)
    assert file.kind == "wikitext"
    found = read(file)
    start = WIKI.index(" = E =")
    assert texts(found) == [WIKI[2:start], WIKI[start:]]
    assert [record.line for record in found] == [2, 7]


@pytest.mark.parametrize("front", ["", " \n\n", "\ufeff"])
def test_text_before_the_first_title_is_a_document_unless_blank(tmp_path: Path, front: str) -> None:
    path = tmp_path / "in.txt"
    path.write_text(front + "some words \n more \n" + " = Title = \n x \n", newline="")
    assert texts(read(one_file(path, "wikitext"))) == [
        "some words \n more \n",
        " = Title = \n x \n",
    ]
    path.write_text(front + " = Title = \n x \n", newline="")
    assert texts(read(one_file(path, "wikitext"))) == [" = Title = \n x \n"]


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    values = [f"row {number} é" * number for number in range(7)]
    texts_of = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())
    dictionaries = [pa.dictionary(pa.int32(), kind) for kind in texts_of[:4]]
    for kind in (*texts_of, *dictionaries):
        body = pa.array(values).dictionary_encode() if kind in dictionaries else pa.array(values)
        table = pa.table({"n": list(range(7)), "body": body.cast(kind)})
        parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
        file = one_file(tmp_path / "in.parquet")
        assert (file.kind, file.rereadable) == ("parquet", False)
        found = read(file, text_key="body")
        assert texts(found) == values
        assert [record.line for record in found] == [1, 2, 3, 4, 5, 6, 7]
        assert scan_ranges(file, 5) == [(0, file.size)]


LINE = st.one_of(
    st.sampled_from([b"", b" ", b"\r", BOM, b"\xff", b" = T = ", b" = = S = = ", b'{"text": 3}']),
    st.text(max_size=9).map(lambda text: json.dumps({"text": text}).encode()),
    st.binary(max_size=6),
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
CONTENT = st.tuples(
    st.sampled_from([b"", BOM]), st.lists(st.tuples(LINE, ENDS).map(b"".join), max_size=9), LINE
).map(lambda parts: parts[0] + b"".join(parts[1]) + parts[2])


@pytest.mark.parametrize("format_", ["lines", "jsonl", "wikitext"])
@settings(max_examples=80, deadline=None)
@given(content=CONTENT, unit_bytes=st.integers(1, 40))
def test_any_ranges_give_the_records_of_one(
    tmp_path_factory: pytest.TempPathFactory, format_: str, content: bytes, unit_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "in"
    path.write_bytes(content)
    file = one_file(path, format_)
    ranges = scan_ranges(file, unit_bytes)
    assert [ranges[0][0], *(stop for _, stop in ranges)][-1] == file.size
    whole = read(file)
    assert read(file, unit_bytes=unit_bytes) == whole
    for record in whole:
        if isinstance(record, Record):
            place = (record.offset, record.size, record.line)
            assert record.text is not None
            assert hashlib.sha256(record.text.encode()).digest() == record.sha256
            assert read_again(file, "text", place) == record.text
            assert "".join(read_text_chunks(file, place, chunk_bytes=3)) == record.text


class CountsBytes(io.BytesIO):
    read_bytes = 0

    def readline(self, size: int | None = -1) -> bytes:
        raw = super().readline(size)
        self.read_bytes += len(raw)
        return raw


@pytest.mark.parametrize("past_stop", [False, True])
def test_a_line_of_many_ranges_is_read_twice_at_most(
    monkeypatch: pytest.MonkeyPatch, past_stop: bool
) -> None:
    monkeypatch.setattr("data_pipeline.readers.source.CHUNK_BYTES", 8)
    content = b"x" * 2000
    stream = CountsBytes(content + b"\nend")
    found = []
    for start in range(0, len(content), 20):
        stream.seek(0)
        source = Source("in", stream, start, start + 20, "text", rereadable=True)
        found += [piece.offset for piece in read_line_chunks(source, past_stop=past_stop)]
    assert stream.read_bytes < 2.5 * len(content)
    assert found == sorted({*found}), "every piece once"


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
                expected.append((line, body.decode()))
            except UnicodeDecodeError:
                expected.append((line, None))
    found = read(one_file(path, "lines"))
    assert [(record.line, getattr(record, "text", None)) for record in found] == expected


@pytest.mark.parametrize("format_", ["text", "lines", "wikitext"])
def test_a_document_too_long_to_hold_is_checked_and_read_in_pieces(
    tmp_path: Path, format_: str
) -> None:
    body = ("é😀x" * (HELD_BYTES // 7 + 100)).encode()  # no piece ends between characters
    raw = (b" = T = \n" if format_ == "wikitext" else b"") + body
    path = tmp_path / "in.txt"
    path.write_bytes(b"short\n" * (format_ != "text") + raw)
    file = one_file(path, format_)
    record = read(file)[-1]
    assert isinstance(record, Record)
    assert record.text is None
    assert record.sha256 == hashlib.sha256(raw).digest()
    place = (record.offset, record.size, record.line)
    pieces = list(read_text_chunks(file, place, chunk_bytes=1_000_001))
    assert max(len(piece.encode()) for piece in pieces) <= 1_000_004
    assert "".join(pieces).encode() == raw
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends 1 bytes before"):
        list(read_text_chunks(file, place, chunk_bytes=1_000_001))


def test_a_bad_byte_of_a_long_document_is_named(tmp_path: Path) -> None:
    at = HELD_BYTES + 12_345
    content = bytearray(b"x" * (HELD_BYTES + 2 * CHUNK_BYTES))
    content[at : at + 2] = b"\xc3\x28"
    (tmp_path / "in.txt").write_bytes(content)
    (found,) = read(one_file(tmp_path / "in.txt"))
    assert (found.byte, found.line) == (at, 0)
    assert "invalid UTF-8: byte 0xc3" in found.reason


def test_a_bad_byte_behind_a_torn_character_and_half_a_one_at_the_end_are_named(
    tmp_path: Path,
) -> None:
    torn = b"x" * (HELD_BYTES + 2 * CHUNK_BYTES - 1) + "é".encode()
    for content, at in (
        (torn[:-1] + b"\xff", len(torn) - 2),
        (torn[:-1], len(torn) - 2),
        (torn + b"\xff", len(torn)),
    ):
        (tmp_path / "in.txt").write_bytes(content)
        (found,) = read(one_file(tmp_path / "in.txt"))
        assert isinstance(found, Reject)
        assert found.byte == at


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_line_end_is_not_torn_where_a_piece_ends(tmp_path: Path, shift: int) -> None:
    first = "a" * (CHUNK_BYTES - 1 + shift)
    (tmp_path / "in.txt").write_text(first + "\r\nb\r\n", newline="")
    assert texts(read(one_file(tmp_path / "in.txt", "lines"))) == [first, "b"]
