"""CSV and TSV: every row is a document, and damage is named."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.readers import Record, Reject, find_files
from tests.data_pipeline.readers.reading import one_file, read, texts

FIELDS = st.text(st.sampled_from('ab",\t\n\r\u2028é '), max_size=6)


@settings(max_examples=12, deadline=None)
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1), suffix=st.sampled_from(["csv", "tsv"]))
def test_what_a_writer_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], suffix: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"in.{suffix}.gz"
    file = io.StringIO()
    writer = csv.writer(file, delimiter="\t" if suffix == "tsv" else ",", quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "text"), *rows])
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + file.getvalue().encode(), 1))
    records = read(one_file(path))
    assert texts(records) == [text for _, text in rows]
    assert [record.line for record in records] == [*range(1, len(rows) + 1)]


BAD_FILES = {
    "empty": (b"", [], "it has no first row with the names of its columns"),
    "no column": (b"id,body\n1,x\n", [], 'no column "text"; columns: id, body'),
    "misspelled": (b"id,txt\n1,x\n", [], 'no column "text"; did you mean "txt"?'),
    "semicolons": (b"id;text\n1;x\n", [], "its columns seem to be separated by ';'"),
    "column twice": (b"text,text\nx,y\n", [], 'two columns are named "text"'),
    "few fields": (b"id,text\n1,x\n2\n3,z\n", ["x", "z"], "the row has 1 fields, the first"),
    "many fields": (b"id,text\n1,x\n2,y,\n3,z\n", ["x", "z"], "the row has 3 fields"),
    "not UTF-8": (b"text\nx\ny\xff\nz\n", ["x", "z"], "invalid UTF-8 at byte 1 of the text"),
    "open quote": (b'text\nx\n"half', ["x"], "damaged CSV: unexpected end of data"),
    "inner quote": (b'text\nx\n"a"b\n', ["x"], "damaged CSV: ',' expected after '\"'"),
    "bare CR": (b'text\nx\n"a"\rb\n', ["x", "a", "b"], ""),
    "binary": (b"\x00\x01\x02\xff", [], 'no column "text"'),
}  # fmt: skip


@pytest.mark.parametrize(("content", "good", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_rejected_by_name(
    tmp_path: Path, content: bytes, good: list[str], reason: str
) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    records = read(one_file(tmp_path / "in.csv"))
    assert [record.text for record in records if isinstance(record, Record)] == good
    rejects = [record for record in records if isinstance(record, Reject)]
    assert len(rejects) == bool(reason)
    assert all(reason in reject.reason and reject.file == "in.csv" for reject in rejects)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(content)[:-9])
    assert isinstance(read(one_file(tmp_path / "cut.csv.gz"))[-1], Reject)


def test_a_quote_that_is_not_closed_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.readers.columns.MAX_RECORD_BYTES", 100)
    for rest in ("y\n" * 99, "y" * 999, '","y\n' * 99):
        (tmp_path / "in.csv").write_text('text\nx\n"' + rest)
        first, reject = read(one_file(tmp_path / "in.csv"))
        assert isinstance(first, Record)
        assert isinstance(reject, Reject)
        assert reject.loses_rest
        assert "the limit" in reject.reason or "field limit" in reject.reason


def test_csv_files_in_a_folder_are_text_unless_the_format_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")

    def kinds(address: Path, format: str = "auto") -> dict[str, int]:
        return dict(find_files([str(address)], format=format, exclude=Path("/nowhere")).kinds)

    assert kinds(tmp_path) == {"text": 1}
    assert kinds(tmp_path, "csv") == kinds(tmp_path / "*.csv") == kinds(tmp_path / "a.csv")
    assert kinds(tmp_path / "a.csv") == {"csv": 1}
