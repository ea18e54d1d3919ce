"""WET files of Common Crawl: one document per page, and what is refused."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.readers import Record, Reject
from tests.data_pipeline.preparation.preparing import texts_of
from tests.data_pipeline.readers.reading import one_file, read, texts

PAGES = {
    "https://a.org/one": "First\nOf two lines: été",
    "https://a.org/two?q=ü": "WARC/1.0\r\nContent-Length: 3\r\n\r\nabc",
    "https://b.org/": "Third\n\n",
}


def record(kind: str, text: bytes, **headers: str) -> bytes:
    names = {"WARC-Type": kind, **headers, "Content-Length": str(len(text))}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in names.items())
    return b"WARC/1.0\r\n" + lines.encode() + b"\r\n" + text + b"\r\n\r\n"


def page(uri: str, text: bytes, number: int = 1) -> bytes:
    id_ = f"<urn:uuid:{number}>"
    return record("conversion", text, WARC_Target_URI=uri, WARC_Record_ID=id_)


INFO = record(
    "warcinfo", b"Software-Info: made for a test\r\n", WARC_Filename="CC-MAIN.warc.wet.gz"
)
WET = [INFO, *(page(uri, text.encode()) for uri, text in PAGES.items())]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("CC-MAIN.warc.wet.gz", b"".join(map(gzip.compress, WET))),
        ("CC-MAIN.wet", b"".join(WET)),
        ("renamed", b"".join(WET)),
    ],
)
def test_every_page_is_a_document_with_its_address_as_id(
    txl: Callable[..., Any], tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    ended = txl("prepare", tmp_path / "in", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert texts_of(tmp_path / "out") == {f"{name}:{uri}": text for uri, text in PAGES.items()}


def test_pages_with_the_same_or_no_address_have_the_id_of_their_record(tmp_path: Path) -> None:
    pages = [page("u", b"a", 1), page("u", b"b", 2), page("", b"c", 3), page("u", b"d", 2)]
    (tmp_path / "in.wet").write_bytes(b"".join(pages))
    records = read(one_file(tmp_path / "in.wet"))
    keys = [each.key for each in records if isinstance(each, Record)]
    assert keys == ["u", "urn:uuid:2", "urn:uuid:3", ""], "the last one is in.wet:4"


def test_a_page_that_is_not_utf8_is_rejected_alone(tmp_path: Path) -> None:
    (tmp_path / "in.wet").write_bytes(INFO + page("a", b"a\xff") + page("b", b"b"))
    reject, good = read(one_file(tmp_path / "in.wet"))
    assert isinstance(reject, Reject)
    assert (reject.line, reject.byte, reject.loses_rest) == (1, 1, False)
    assert texts([good]) == ["b"]


BAD = {
    "whole responses": (INFO + record("response", b"HTTP/1.1 200 OK"), "type 'response'"),
    "WAT": (record("metadata", b"{}"), "type 'metadata', which is no plain text. Give the WET"),
    "no record": (b"some text\n", "no WARC record begins with b'some text"),
    "no length": (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n", "the Content-Length ''"),
    "negative": (INFO.replace(b"Length: ", b"Length: -"), "the Content-Length '-"),
    "truncated": (b"".join(WET)[:-9], "truncated: "),
    "truncated information": (INFO[:-9], "truncated: "),
    "text after a record": (WET[1] + b"more", "no WARC record begins with b'more'"),
    "endless headers": (b"WARC/1.0\r\n" + b"a: b\r\n" * 20_000, "the headers of a record exceed"),
}


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "in.warc.gz").write_bytes(gzip.compress(content))
    *_, reject = read(one_file(tmp_path / "in.warc.gz"))
    assert isinstance(reject, Reject)
    assert reason in reject.reason
    assert (reject.file, reject.loses_rest) == ("in.warc.gz", True)
