"""text: a file is a document, with its path as id. Every character is kept as it is."""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.spans import Source, Span, pieces


def read_text(source: Source) -> Iterator[Record | Reject]:
    document = None
    for piece in pieces(source):
        if document is None:
            document = Span(source, piece.offset, line=0)
        document.add(piece.raw)
    yield (document or Span(source, 0, line=0)).end()
