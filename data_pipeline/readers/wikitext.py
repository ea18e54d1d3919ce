"""wikitext: the articles of a WikiText file, each from its title's line to the next title.

` = Title = ` is a title, ` = = Section = = ` is not. Text before the first title is a document of
its own, from its first line that is not blank.

Source: Merity et al. 2016, arXiv:1609.07843, the files of WikiText-2 and WikiText-103.
"""

from collections.abc import Iterator

from data_pipeline.readers.records import Record, Reject
from data_pipeline.readers.spans import Source, Span, line_pieces

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
    document: Span | None = None
    untitled = source.start == 0  # still before the first title; no other range can be
    for piece in line_pieces(source, past_stop=True):
        if piece.begins and is_title(piece.raw):
            if document:
                yield document.end()
            untitled = False
            if not piece.inside:
                return
            document = Span(source, piece.offset, piece.line)
        elif not document:
            if untitled and piece.raw.strip():
                document = Span(source, piece.offset, piece.line)
            elif not untitled and not piece.inside:
                return
        if document:
            document.add(piece.raw)
    if document:
        yield document.end()
