"""Read a file whole or in ranges, as `txl prepare` does; write token ids as other programs do."""

import hashlib
import io
import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

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


# --- token ids -----------------------------------------------------------------------------------


END, VOCAB_SIZE = 0, 500
RULES = IdRules(VOCAB_SIZE, END, "<u2")
Documents = list[list[int]]


def npy(array: object, **options: object) -> bytes:
    file = BytesIO()
    np.save(file, array, **options)  # type: ignore[arg-type]
    return file.getvalue()


def separated(documents: Documents) -> np.ndarray:
    """One stream, every document closed by the end-of-document id."""
    return np.array([id_ for document in documents for id_ in (*document, END)], "<u2")


def megatron_index(documents: Documents, *, size: int = 2, code: int = 8) -> bytes:
    """The .idx file of Megatron-LM for one sequence per document, by the published layout."""
    lengths = np.array([len(document) for document in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * size]).astype("<i8")
    bounds = np.arange(len(documents) + 1, dtype=np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    return header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes()


def write_megatron(path: Path, documents: Documents) -> None:
    path.write_bytes(b"".join(np.array(document, "<u2").tobytes() for document in documents))
    path.with_suffix(".idx").write_bytes(megatron_index(documents))


def write_parquet(path: Path, documents: Documents) -> None:
    lists = pa.array(documents, pa.list_(pa.int32()))
    parquet.write_table(pa.table({"ids": lists}), path, row_group_size=2)


def write_arrow(path: Path, documents: Documents) -> None:
    table = pa.table({"ids": pa.array(documents, pa.large_list(pa.int16()))})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[Path, Documents], object]] = {
    "jsonl": lambda path, documents: path.write_text(
        "".join(json.dumps({"ids": document}) + "\n" for document in documents)
    ),
    "json": lambda path, documents: path.write_text(json.dumps({"ids": documents})),
    "npy": lambda path, documents: np.save(path, separated(documents)),
    "parquet": write_parquet,
    "arrow": write_arrow,
    "megatron.bin": write_megatron,
    "bin": lambda path, documents: separated(documents).tofile(path),
}
"""Suffix of the file, which decides the kind, and the function that writes it."""
