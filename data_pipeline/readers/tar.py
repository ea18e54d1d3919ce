"""tar: a WebDataset. Members with the same key are a sample, and every sample is a document.

The key is the path up to the first dot of the file name; the rest is the extension. The id of the
document is `FILE:KEY`. Its text is that of the first of these members that the sample has:

1. the extension `--text-key`, such as `caption.txt`
2. only with the default key: `.txt`, or `.npy` with `--format ids`
3. `.json`: an object with the text at `--text-key`
4. `.jsonl`: one document per line, with the ids `FILE:KEY:LINE`

Other members (images, labels) are skipped, and samples named `__NAME__` that have no text, such as
`__meta__.json`. Nothing is written to disk or loaded by name.

Source: webdataset, `tariterators.group_by_keys` and `base_plus_ext`.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_pipeline.errors import printable
from data_pipeline.readers.jsonl import text_of_line
from data_pipeline.readers.records import (
    MAX_RECORD_BYTES,
    BadRecordError,
    BrokenStreamError,
    Record,
    Reject,
    decode,
)
from data_pipeline.readers.source import Source, too_long_error
from data_pipeline.readers.tar_members import Member, TarReader

_MAX_SAMPLES = 2**22
_MAX_KEY_BYTES = 4096
_METADATA = re.compile(r"__[^/]*__(/|\Z)")
"""Members that webdataset skips too."""


@dataclass(slots=True)
class _Sample:
    """The members of one key that were read so far."""

    key: str
    offset: int
    extensions: list[str] = field(default_factory=list)
    rank: int = 99
    """Position of the extension of `content` among the possible ones; less is better."""
    content: bytes = b""
    problem: str = ""


def read_tar(source: Source) -> Iterator[Record | Reject]:
    members, seen = TarReader(source), set[bytes]()
    wanted = _extensions(source)
    sample: _Sample | None = None
    for member in members:
        key, extension = _split_name(member.name)
        if _METADATA.match(member.name) or not posixpath.basename(key):
            continue  # the second: hidden files
        if not sample or key != sample.key:
            if sample:
                yield from _documents(source, sample, wanted)
            sample = _begin(source, key, member, seen)
        _add_member(sample, members, member, extension, wanted)
    if sample:
        yield from _documents(source, sample, wanted)


def _extensions(source: Source) -> list[str]:
    key = source.text_key
    default = [("ids", "npy")] if source.ids else [("text", "txt")]
    others = [extension for name, extension in default if key == name]
    return [key, *others, "json", "jsonl"]


def _split_name(name: str) -> tuple[str, str]:
    directory, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return posixpath.join(directory, stem), extension


def _begin(source: Source, key: str, member: Member, seen: set[bytes]) -> _Sample:
    sample = _Sample(key, member.offset)
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()  # keys may be long
    if digest in seen:
        sample.problem = "the key occurs twice; members of a sample must follow each other"
    seen.add(digest)
    if len(seen) > _MAX_SAMPLES:
        raise BrokenStreamError(
            source.lines, member.offset, f"it has more than {_MAX_SAMPLES:,} samples; divide it"
        )
    if len(key.encode()) > _MAX_KEY_BYTES:
        sample.problem = f"the key is longer than {_MAX_KEY_BYTES:,} bytes"
    return sample


def _add_member(
    sample: _Sample, members: TarReader, member: Member, extension: str, wanted: list[str]
) -> None:
    name = printable(member.name)[:200]
    if member.problem:
        sample.problem = sample.problem or f"member {name} is {member.problem}"
    if extension in sample.extensions:
        sample.problem = sample.problem or f"member {name} occurs twice"
    sample.extensions.append(extension)
    rank = wanted.index(extension) if extension in wanted else sample.rank
    if rank >= sample.rank or sample.problem:
        return
    if member.size > MAX_RECORD_BYTES:
        sample.problem = f"member {name} is {too_long_error().reason}"
        return
    sample.rank, sample.content = rank, members.content()


def _documents(source: Source, sample: _Sample, wanted: list[str]) -> Iterator[Record | Reject]:
    """The documents of a complete sample: one, or one per line of .jsonl."""
    name = posixpath.basename(sample.key)
    may_be_metadata = name.startswith("__") and name.endswith("__")
    for document in _documents_or_rejects(source, sample, wanted):
        if may_be_metadata and isinstance(document, Reject):
            source.lines -= 1  # it is no record
        else:
            yield document


def _documents_or_rejects(
    source: Source, sample: _Sample, wanted: list[str]
) -> Iterator[Record | Reject]:
    extension = wanted[sample.rank] if sample.rank < len(wanted) else ""
    if not sample.problem and not extension:
        members = ", ".join(printable(each)[:40] or "none" for each in sample.extensions[:10])
        sample.problem = (
            f"no member .{', .'.join(wanted)}; its extensions: {members} (see --text-key)"
        )
    if sample.problem or extension != "jsonl" or sample.rank == 0:
        yield _document(source, sample, sample.key, sample.content, extension)
        return
    for number, line in enumerate(sample.content.split(b"\n"), start=1):
        if line.strip():
            yield _document(source, sample, f"{sample.key}:{number}", line, extension)


def _document(
    source: Source, sample: _Sample, key: str, content: bytes, extension: str
) -> Record | Reject:
    source.lines += 1
    try:
        if sample.problem:
            raise BadRecordError(0, sample.problem)
        text = _text_of(source, content, extension, is_text_key=sample.rank == 0)
    except BadRecordError as error:
        reason = f"key {printable(key)[:200]}: {error.reason}"
        return source.reject(source.lines, sample.offset, reason)
    return Record.of(text, offset=sample.offset, size=len(content), line=source.lines, key=key)


def _text_of(source: Source, content: bytes, extension: str, *, is_text_key: bool) -> str:
    is_json = extension in ("json", "jsonl") and not (is_text_key and not source.ids)
    if is_json:
        return text_of_line(content.rstrip() + b"\n", source.text_key, source.ids)
    if not source.ids:
        return decode(content)
    if extension != "npy" and not extension.endswith(".npy"):
        raise BadRecordError(0, f"member .{printable(extension)[:40]} is not .npy, .json or .jsonl")
    # Imported here: numpy is slow to import, and only these members need it.
    from data_pipeline.readers.id_arrays import ids_of_npy
    from data_pipeline.readers.id_documents import text_of_document

    return text_of_document(ids_of_npy(content), source.ids)
