"""lines: a line that is not empty is a document, without the LF or CR LF that ends it."""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.spans import Source, Span, line_pieces


def read_lines(source: Source) -> Iterator[Record | Reject]:
    document: Span | None = None
    for piece in line_pieces(source):
        ends = piece.raw.endswith(b"\n")
        body = piece.raw[:-1].removesuffix(b"\r") if ends else piece.raw
        if body:
            document = document or Span(source, piece.offset, piece.line)
            document.add(body)
        if ends and document:
            yield document.end()
            document = None
    if document:
        yield document.end()
