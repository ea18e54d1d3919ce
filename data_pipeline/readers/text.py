"""text: a file is one document, with its path as id. The text is not changed."""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.source import DocumentBuilder, Source, read_chunks


def read_text(source: Source) -> Iterator[Record | Reject]:
    document = None
    for chunk in read_chunks(source):
        document = document or DocumentBuilder(source, chunk.offset, line=0)
        document.add(chunk.raw)
    yield (document or DocumentBuilder(source, 0, line=0)).build()
