"""lines: every line that is not empty is a document, without the LF or CR LF at its end."""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.source import DocumentBuilder, Source, read_line_chunks


def read_lines(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    for chunk in read_line_chunks(source):
        ends_line = chunk.raw.endswith(b"\n")
        body = chunk.raw[:-1].removesuffix(b"\r") if ends_line else chunk.raw
        if body:
            document = document or DocumentBuilder(source, chunk.offset, chunk.line)
            document.add(body)
        if ends_line and document:
            yield document.build()
            document = None
    if document:
        yield document.build()
