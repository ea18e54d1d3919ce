"""wikitext: the articles of a WikiText file, each from its title line to the next title.

` = Title = ` is a title, ` = = Section = = ` is not. Text before the first title is a separate
document; blank lines there belong to the first article, so that no line of the file is lost.

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
    is_blank = True  # the lines of `document`
    # Past `stop`, because the last article of a range ends at a title of a later range.
    for chunk in read_line_chunks(source, past_stop=True):
        if chunk.starts_line and is_title(chunk.raw):
            if document and not is_blank:
                yield document.build()
                document = None
            if not chunk.in_range:
                return
        elif not document and source.start > 0:  # the first range alone has text without a title
            if not chunk.in_range:
                return
            continue
        document = document or DocumentBuilder(source, chunk.offset, chunk.line)
        document.add(chunk.raw)
        is_blank = is_blank and not chunk.raw.strip()
    if document and not is_blank:
        yield document.build()
