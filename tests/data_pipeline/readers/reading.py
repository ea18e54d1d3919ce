"""Read a file as a whole or in ranges, as `txl prepare` does."""

import hashlib
import io
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.readers import (
    IdRules,
    InputFile,
    InputFiles,
    Record,
    Reject,
    Source,
    find_files,
    read_records,
    scan_ranges,
)


@dataclass(slots=True)
class Document(Record):
    """A record with its text."""

    text: str = ""


Records = list[Document | Reject]


def find(
    *inputs: object,
    format: str = "auto",
    out: Path = Path("/nowhere"),
    ids: IdRules | None = None,
    text_key: str = "text",
    is_wikitext: bool = False,
) -> InputFiles:
    return find_files(
        [str(each) for each in inputs],
        format=format,
        out=out,
        ids=ids,
        text_key=text_key,
        is_wikitext=is_wikitext,
    )


def one_file(path: Path | str, format: str = "auto", ids: IdRules | None = None) -> InputFile:
    (file,) = find(path, format=format, ids=ids, text_key="ids" if ids else "text").files
    return file


def read(file: InputFile, *, text_key: str = "", unit_bytes: int = 2**30) -> Records:
    """All records of the file, range by range, with lines counted from its beginning."""
    records: Records = []
    lines = 0
    for start, stop in scan_ranges(file, unit_bytes):
        texts = io.BytesIO()
        text_key = text_key or ("ids" if file.ids else "text")
        source = Source(file, text_key, start, stop, texts)
        for record in read_records(source):
            line = record.line + lines * (record.line > 0)
            if isinstance(record, Reject):
                records.append(replace(record, line=line))
            else:
                raw = texts.getvalue()[record.offset :][: record.size]
                assert hashlib.sha256(raw).digest() == record.sha256
                document = Document(0, len(raw), line, record.sha256, record.key, raw.decode())
                records.append(document)
        lines += source.lines
    return records


def only_reject(
    path: Path, format: str = "auto", ids: IdRules | None = None, *, text_key: str = ""
) -> Reject:
    """The reject of a file of which no document can be read."""
    (reject,) = read(one_file(path, format, ids), text_key=text_key)
    assert isinstance(reject, Reject)
    return reject


def kinds_of(found: InputFiles) -> dict[str, int]:
    """The number of files of every kind."""
    return dict(Counter(file.kind for file in found.files))


def texts(records: Records) -> list[str]:
    assert not rejects(records)
    return [record.text for record in records if isinstance(record, Document)]


def rejects(records: Records) -> list[Reject]:
    return [record for record in records if isinstance(record, Reject)]


def split_at_reject(records: Records) -> tuple[list[str], Reject]:
    """The texts of all records but the last, and the last, which is the only Reject."""
    assert isinstance(records[-1], Reject), records[-1]
    return texts(records[:-1]), records[-1]
