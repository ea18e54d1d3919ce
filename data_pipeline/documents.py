"""Documents: text files, folders of them, and JSON lines, read one record at a time.

Finds the input files in a fixed order, takes records out of them, and says of every record that is
no usable text where it stands and why. What becomes of documents is `prepare.py`'s business.

A text file is one document with its path as id; a line of a `.jsonl` file is one with `path:line`.
A byte-order mark at a file's start is dropped; every other character is kept as it is.
"""

import codecs
import contextlib
import itertools
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.errors import DataError

Format = Literal["auto", "text", "jsonl"]
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_NOT_TEXT = {
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".ico", ".tif", ".tiff"),
    *(".mp3", ".ogg", ".wav", ".flac", ".mp4", ".mkv", ".avi", ".webm", ".mov"),
    *(".ttf", ".otf", ".woff", ".woff2", ".pyc", ".so", ".o", ".a", ".exe", ".dll"),
}
"""Suffixes that are never text: ignored in folders, and counted. All else must be UTF-8."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read. `name` is its path relative to the input it was found in, always UTF-8."""

    path: Path
    name: str
    kind: Literal["text", "jsonl"]
    size: int = 0
    """Bytes when it was found; 0 for what is no file."""

    @property
    def rereadable(self) -> bool:
        """Whether `read_again` finds a record by its offset without reading all before it."""
        return True


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files in reading order, and how many were ignored, by suffix."""

    files: list[InputFile]
    ignored: Counter[str]


@dataclass(frozen=True, slots=True)
class Record:
    """A document's text and where it stands: `size` bytes at `offset`, line 0 for whole files."""

    text: str
    offset: int
    size: int
    line: int


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used. `byte` is the file's byte where it goes wrong."""

    file: str
    line: int
    byte: int
    reason: str

    def to_json(self) -> str:
        content = {"file": self.file, "line": self.line or None, "byte": self.byte}
        return json.dumps({**content, "reason": self.reason})

    def __str__(self) -> str:
        place = f"{self.line}:byte {self.byte}" if self.line else f"byte {self.byte}"
        return f"{printable(self.file)}:{place}: {self.reason}"


class _BadRecordError(ValueError):
    def __init__(self, byte: int, reason: str) -> None:
        super().__init__(reason)
        self.byte, self.reason = byte, reason


def printable(text: str) -> str:
    """`text` with control characters escaped: safe to show on a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def find_files(inputs: list[Path], *, format: Format, exclude: Path) -> InputFiles:
    """Every file to read, each input's files sorted by path. Hidden files are left out.

    Folders are walked to the end, through links but never twice into the same folder, and not into
    `exclude` (the output). Raises DataError for a missing input, a folder without any text, and two
    files of the same name.
    """
    try:
        return _find_files(inputs, format=format, exclude=exclude)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error


def _find_files(inputs: list[Path], *, format: Format, exclude: Path) -> InputFiles:
    files: list[InputFile] = []
    ignored: Counter[str] = Counter()
    for given in inputs:
        if given.is_dir():
            found = [
                file for file in _walk(given, exclude) if not _is_ignored(file, format, ignored)
            ]
            if not found:
                raise DataError(
                    f"{given}: no text in this folder"
                    f"{_list_ignored(ignored)}. Give a folder with text or .jsonl files."
                )
            files += [_input_file(path, path.relative_to(given), format) for path in found]
        elif given.exists():
            files.append(_input_file(given, Path(given.name), format))
        else:
            cause = "a link to nothing" if given.is_symlink() else "no such file or folder"
            raise DataError(f"{given}: {cause}. Check the spelling; paths are relative to here.")
    seen: dict[str, Path] = {}
    for file in files:
        if file.name in seen:
            raise DataError(
                f"{seen[file.name]} and {file.path} would both be document {file.name!r}. Give a "
                "folder that contains both, or rename one."
            )
        seen[file.name] = file.path
    return InputFiles(files, ignored)


def _input_file(path: Path, name: Path, format: Format) -> InputFile:
    looks_like_lines = path.suffix.lower() in JSONL_SUFFIXES
    lines = format == "jsonl" or (format == "auto" and looks_like_lines)
    id_ = os.fsencode(name.as_posix()).decode("utf-8", errors="backslashreplace")
    size = 0
    with contextlib.suppress(OSError):
        size = path.stat().st_size
    return InputFile(path, id_, "jsonl" if lines else "text", size)


def _walk(folder: Path, exclude: Path) -> list[Path]:
    """Every visible non-folder below `folder`, sorted by the bytes of its relative path."""
    skipped = _identity(exclude)
    visited = {skipped} if skipped else set()
    found: list[Path] = []
    pending = [folder]
    while pending:
        # Of two links to one folder the first in sorted order wins, so the ids stay the same.
        here = pending.pop(0)
        identity = _identity(here)
        if identity in visited:
            continue
        if identity:
            visited.add(identity)
        entries = sorted(here.iterdir(), key=os.fsencode)
        visible = [entry for entry in entries if not entry.name.startswith(".")]
        pending += [entry for entry in visible if entry.is_dir()]
        found += [entry for entry in visible if not entry.is_dir()]
    return sorted(found, key=os.fsencode)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_ignored(path: Path, format: Format, ignored: Counter[str]) -> bool:
    suffix = path.suffix.lower()
    skip = suffix not in JSONL_SUFFIXES if format == "jsonl" else suffix in _NOT_TEXT
    ignored[suffix or "without suffix"] += skip
    return skip


def _list_ignored(ignored: Counter[str]) -> str:
    counts = ", ".join(f"{count} {printable(name)}" for name, count in (+ignored).items())
    return f" (ignored: {counts})" if counts else ""


def scan_ranges(file: InputFile, unit_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges [start, stop) that cover a file, each of about `unit_bytes`, to be read apart.

    JSON lines are cut anywhere: a line is in the range that holds its first byte.
    """
    if file.kind == "text":
        return [(0, file.size)]
    bounds = [*range(0, max(file.size, 1), unit_bytes), file.size]
    return list(itertools.pairwise(bounds))


def read_records(
    file: InputFile, text_key: str, start: int, stop: int
) -> Iterator[Record | Reject]:
    """Every record of a range of a file, in order; what cannot be used as a Reject, no exception.

    Lines are counted within the range, from 1.
    """
    try:
        status = file.path.stat()
        if not stat.S_ISREG(status.st_mode):
            yield Reject(file.name, 0, 0, "not a regular file")
        elif file.kind == "text":
            yield _whole_file(file)
        else:
            yield from _lines(file, text_key, start, stop)
    except OSError as error:
        yield Reject(file.name, 0, 0, f"cannot be read: {error.strerror}")


def read_again(file: InputFile, text_key: str, place: tuple[int, int, int]) -> str:
    """The text of the record at `place`, its offset, size and line.

    Raises OSError or ValueError when there is none now.
    """
    offset, size, line = place
    with file.path.open("rb") as stream:
        stream.seek(offset)
        raw = stream.read(size)
    return _text_of_line(raw, text_key, truncated=False) if line else _decode(raw)


def _whole_file(file: InputFile) -> Record | Reject:
    raw = file.path.read_bytes()
    offset = _mark_size(raw)
    try:
        return Record(_decode(raw[offset:]), offset, len(raw) - offset, 0)
    except _BadRecordError as error:
        return Reject(file.name, 0, offset + error.byte, error.reason)


def _lines(file: InputFile, text_key: str, start: int, stop: int) -> Iterator[Record | Reject]:
    with file.path.open("rb") as stream:
        if start:
            stream.seek(start - 1)
            while (skipped := stream.readline(2**20)) and not skipped.endswith(b"\n"):
                pass
            offset = begin = stream.tell()
        else:
            offset, begin = _mark_size(stream.read(4)), 0  # the mark is part of the first line
            stream.seek(offset)
        line = 0
        while begin < stop and (raw := stream.readline()):
            line += 1
            if raw.strip():
                try:
                    text = _text_of_line(raw, text_key, truncated=not raw.endswith(b"\n"))
                    yield Record(text, offset, len(raw), line)
                except _BadRecordError as error:
                    yield Reject(file.name, line, offset + error.byte, error.reason)
            offset = begin = offset + len(raw)


def _mark_size(raw: bytes) -> int:
    return len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadRecordError(error.start, utf8_problem(error, raw)) from None


def utf8_problem(error: UnicodeDecodeError, beginning: bytes) -> str:
    """What is wrong with bytes that are no UTF-8; `beginning` is how their record begins."""
    hint = ""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        hint = "; it looks like UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    found = error.object[error.start : error.start + 1].hex()
    return f"invalid UTF-8: byte 0x{found}, {error.reason}{hint}"


def _text_of_line(raw: bytes, text_key: str, *, truncated: bool) -> str:
    line = _decode(raw)
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        byte = len(line[: error.pos].encode())
        kind = "truncated record: the file ends inside a line" if truncated else "broken JSON"
        raise _BadRecordError(byte, f"{kind} ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise _BadRecordError(0, f"unreadable JSON ({str(error)[:80]})") from None
    if not isinstance(content, dict):
        raise _BadRecordError(0, f"not a JSON object but a {type(content).__name__}")
    if text_key not in content:
        seen = ", ".join(printable(key)[:40] for key in list(content)[:10]) or "none"
        raise _BadRecordError(0, f'no key "{text_key}"; keys seen: {seen} (see --text-key)')
    text = content[text_key]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise _BadRecordError(0, f'"{text_key}" is not a string but {kind}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        reason = f"lone surrogate U+{code:04X} at character {error.start} of the text"
        raise _BadRecordError(0, reason) from None
    return text
