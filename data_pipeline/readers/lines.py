"""lines: every line that is not empty is a document, without the LF or CR LF at its end.

blank_lines: documents are separated by blank lines, as in OSCAR 21.09. A blank line is empty
or whitespace. The lines of a document keep their ends.
"""

from collections.abc import Iterator
from itertools import accumulate

from data_pipeline.readers.records import Record, RecordBlock, Reject
from data_pipeline.readers.source import (
    DocumentBuilder,
    LineBlock,
    Source,
    read_line_blocks,
    read_line_chunks,
)


def read_lines(source: Source) -> Iterator[Record | RecordBlock | Reject]:
    document: DocumentBuilder | None = None
    for piece in read_line_blocks(source):
        if isinstance(piece, LineBlock):
            yield from _read_block(source, piece)
            continue
        document = document or DocumentBuilder(source, piece.offset, piece.line)
        ends_line = piece.raw.endswith(b"\n")
        document.add(piece.raw[:-1].removesuffix(b"\r") if ends_line else piece.raw)
        if ends_line:
            yield document.build()
            document = None
    if document:
        yield document.build()


def _read_block(source: Source, block: LineBlock) -> Iterator[RecordBlock | Record | Reject]:
    raw = block.raw.split(b"\n")
    offsets = list(accumulate((len(line) + 1 for line in raw), initial=block.offset))
    texts, last = raw, raw.pop()
    if b"\r" in block.raw:
        texts = [line.removesuffix(b"\r") for line in raw]
    if last:  # the last line of the file, without a line break
        texts.append(last)
    documents = [
        (text, offset, line)
        for line, (text, offset) in enumerate(zip(texts, offsets, strict=False), block.line)
        if text
    ]
    if not documents:
        return
    try:
        block.raw.decode("utf-8")
        is_good = source.keeps_nul or b"\0" not in block.raw
    except UnicodeDecodeError:
        is_good = False
    if is_good:
        yield RecordBlock(*map(list, zip(*documents, strict=True)))
    else:  # find the lines at fault
        for text, offset, line in documents:
            document = DocumentBuilder(source, offset, line)
            document.add(text)
            yield document.build()


def read_blank_lines(source: Source) -> Iterator[Record | Reject]:
    document: DocumentBuilder | None = None
    # A document belongs to the range with the last blank line before it.
    is_ours = source.start == 0
    for chunk in read_line_chunks(source, past_stop=True):
        if chunk.starts_line and not chunk.raw.strip():
            if document:
                yield document.build()
                document = None
            if not chunk.in_range:
                return
            is_ours = True
        elif document or is_ours:
            document = document or DocumentBuilder(source, chunk.offset, chunk.line)
            document.add(chunk.raw)
        elif not chunk.in_range:
            return
    if document:
        yield document.build()
