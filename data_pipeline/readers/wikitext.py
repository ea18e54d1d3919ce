"""wikitext: the articles of a WikiText file, each from its title line to the next title.

` = Title = ` is a title, ` = = Section = = ` is not. Text before the first title is a separate
document that starts at its first line that is not blank.

Source: Merity et al. 2016, arXiv:1609.07843, the files of WikiText-2 and WikiText-103.
"""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.source import DocumentBuilder, Source, read_line_chunks

MAX_TITLE_BYTES = 4096


def is_title(line: bytes) -> bool:
    inner = line.strip()
    return (
        line.startswith(b" = ")
        and len(line) <= MAX_TITLE_BYTES
        and len(inner) > 4
        and inner.endswith(b" =")
        and not inner.startswith(b"= =")
        and not inner.endswith(b"= =")
    )


def read_wikitext(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    before_first_title = source.start == 0  # only the first range can have text without a title
    # Past `stop`, because the last article of a range ends at a title of a later range.
    for chunk in read_line_chunks(source, past_stop=True):
        if chunk.starts_line and is_title(chunk.raw):
            if document:
                yield document.build()
            before_first_title = False
            if not chunk.in_range:
                return
            document = DocumentBuilder(source, chunk.offset, chunk.line)
        elif not document:
            if before_first_title and chunk.raw.strip():
                document = DocumentBuilder(source, chunk.offset, chunk.line)
            elif not before_first_title and not chunk.in_range:
                return
        if document:
            document.add(chunk.raw)
    if document:
        yield document.build()
