"""The formats: which files have which, and reading the records of a file in its format.

A format is one function that reads a `Source` and one line in `FORMATS`
(docs/how_to/add_a_reader.md). `find.py` finds the files, `system/sources.py` opens them.

The kind of a file is decided by its suffix, and by its first bytes where the suffix is ambiguous.
`--format auto` ignores a suffix of compression (.gz, .gzip, .zst, .zstd, .bz2, .xz) and then
decides by

1. the `suffixes` of `FORMATS`. The formats that are not `in_folders`, tar and csv, are only read
   by name or pattern. .parquet and .arrow files with "wiki" in their path, or with a recipe of
   WikiText, are wikitext_rows if their rows are lines of WikiText.
2. the first bytes: jsonl if the first line that is not blank is a JSON object with the key
   `--text-key`, or if the first two are JSON objects; wikitext if the suffix is .tokens or "wiki"
   is in the name, and that line is ` = Title = `; binary (`text.py`); else text. Of files at URLs,
   only those with a suffix of `_UNTYPED` or a name of WikiText are examined: each takes a request.

The kinds `lines` and `blank_lines` are never chosen automatically. In a folder or pattern,
`--format jsonl` reads the files that auto would read as jsonl.

`--format ids` decides by the `suffixes` of `ID_FORMATS`, for .bin files by whether the same
directory has Megatron-LM's index of it (`ids.py`), and for .json files by the first bytes.
"""

import contextlib
import json
import math
import posixpath
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError, DataError, UnfinishedError
from data_pipeline.readers.columns import read_csv, read_table
from data_pipeline.readers.ids import MAGIC, index_path, read_bin, read_npy, read_pair
from data_pipeline.readers.source import (
    BrokenStreamError,
    IdRules,
    InputFile,
    Record,
    Reject,
    Source,
    mark_of,
)
from data_pipeline.readers.tar import read_tar
from data_pipeline.readers.text import (
    HEAD_BYTES,
    has_wikitext_rows,
    is_binary,
    is_title,
    read_binary,
    read_blank_lines,
    read_id_json,
    read_jsonl,
    read_lines,
    read_text,
    read_wikitext,
    read_wikitext_rows,
)
from data_pipeline.system.path_kind import PathKind, kind_of
from data_pipeline.system.remote_path import dataset_path
from data_pipeline.system.sources import is_transient, reject_reason, scheme_of, shown

_MAX_OBJECT_BYTES = 16 * 2**20
"""Bytes of a line that is examined to decide whether a file is JSON lines."""
_UNTYPED = ("", ".jl", ".wet", ".warc", ".wat")
"""Suffixes whose content is examined also at URLs. .jl: JSON lines, or source code in Julia."""
_LLMC_NUMBERS = (20240520, 20240522, 20240801)
"""First int32 of the files of llm.c and modded-nanogpt, whose headers have 1,024 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How files of one kind are read."""

    read: Callable[[Source], Iterator[Record | Reject]]
    suffixes: tuple[str, ...] = ()
    """Suffixes that "auto" reads as this kind. In a folder, an explicit --format reads only these;
    () means all files that are not known to be binary."""
    by_range: bool = False
    """Whether `read` respects `start` and `stop` of the source and counts `lines`."""
    in_folders: bool = True
    """Whether "auto" reads these suffixes as this kind also in folders, not only by name or
    pattern. Folders of source code have .csv and .tar files that are not corpora."""


_JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson")
FORMATS: dict[str, FileFormat] = {
    "text": FileFormat(read=read_text),
    "lines": FileFormat(read=read_lines, by_range=True),
    "blank_lines": FileFormat(read=read_blank_lines),
    "jsonl": FileFormat(read=read_jsonl, suffixes=(*_JSON_LINES, ".json"), by_range=True),
    "parquet": FileFormat(read=read_table, suffixes=(".parquet", ".pq")),
    "wikitext": FileFormat(read=read_wikitext),
    "wikitext_rows": FileFormat(read=read_wikitext_rows),
    "tar": FileFormat(read=read_tar, suffixes=(".tar",), in_folders=False),
    "arrow": FileFormat(read=read_table, suffixes=(".arrow",)),
    "csv": FileFormat(read=read_csv, suffixes=(".csv", ".tsv", ".tab"), in_folders=False),
    "binary": FileFormat(read=read_binary),
}
ID_FORMATS: dict[str, FileFormat] = {
    "jsonl": replace(FORMATS["jsonl"], suffixes=_JSON_LINES),
    "json": FileFormat(read=read_id_json, suffixes=(".json",)),
    "npy": FileFormat(read=read_npy, suffixes=(".npy",), by_range=True),
    "parquet": FORMATS["parquet"],
    "arrow": FORMATS["arrow"],
    "tar": FORMATS["tar"],
    "bin": FileFormat(read=read_bin, suffixes=(".bin",), by_range=True),
    "megatron": FileFormat(read=read_pair, by_range=True),
}
"""The kinds of files that `--format ids` reads, with token ids instead of text."""


def format_names() -> tuple[str, ...]:
    """The values of `--format` other than auto."""
    return (*(kind for kind in FORMATS if kind not in ("binary", "wikitext_rows")), "ids")


def suffixes_of(format: str) -> tuple[str, ...]:
    """The suffixes of the files that an explicit format reads; () for all."""
    if format == "ids":
        return tuple(suffix for each in ID_FORMATS.values() for suffix in each.suffixes)
    return FORMATS[format].suffixes


def format_of(file: InputFile) -> FileFormat:
    return (ID_FORMATS if file.ids else FORMATS)[file.kind]


# --- the kind of a file ---------------------------------------------------------------------------


class KindRules(NamedTuple):
    """The options that decide the kinds of files."""

    format: str
    """A key of FORMATS; "auto": decided for every file; or "ids": a key of ID_FORMATS is."""
    ids: IdRules | None
    """Given if and only if the format is "ids"."""
    text_key: str
    is_wikitext: bool
    """Whether a recipe of WikiText is given."""


def with_kind(file: InputFile, rules: KindRules, *, in_folder: bool) -> InputFile:
    """The file with its kind, and with all that follows from it."""
    kind = rules.format
    if rules.ids:
        kind = _kind_of_ids(file, rules.ids)
    elif kind == "auto":
        kind = _kind_of(file, rules, in_folder=in_folder)
    if kind == "jsonl" and file.suffix.name == ".json":
        _require_json_lines(file)
    if kind == "megatron":
        index = index_path(file.path)
        is_marked = file.mark and not (file.archive or scheme_of(index))
        mark = f"{file.mark} {mark_of(index)}" if is_marked else file.mark
        file = replace(file, next_paths=(index,), mark=mark)
    return replace(file, kind=kind, ids=rules.ids, keeps_nul=rules.format in ("text", "tar"))


def _kind_of(file: InputFile, rules: KindRules, *, in_folder: bool) -> str:
    """The kind of a file for "auto"; see the module docstring."""
    suffix = file.suffix
    for kind, file_format in FORMATS.items():
        if suffix.name in file_format.suffixes and (file_format.in_folders or not in_folder):
            may_have_lines = kind in ("parquet", "arrow") and not suffix.packed
            may_be_wikitext = rules.is_wikitext or "wiki" in file.place.lower()
            has_lines = (
                may_have_lines and may_be_wikitext and has_wikitext_rows(file, rules.text_key)
            )
            return "wikitext_rows" if has_lines else kind
    name = posixpath.basename(file.name).lower()
    may_be_wikitext = suffix.name == ".tokens" or "wiki" in name
    if scheme_of(file.path) and not may_be_wikitext and suffix.name not in _UNTYPED:
        return "text"
    head = file.first_bytes(HEAD_BYTES)
    if head.startswith(b"WARC/1."):
        raise DataError(
            f"{shown(file.place)} is an archive of web pages; it is not read. Write its texts as "
            "JSON lines: docs/removed.md has the lines of Python."
        )
    if holds_json_lines(file, rules.text_key, head=head):
        return "jsonl"
    lines = head.removeprefix(BOM_UTF8).split(b"\n") if may_be_wikitext else []
    if is_title(next(filter(bytes.strip, lines), b"")):
        return "wikitext"
    return "binary" if is_binary(head) else "text"


def holds_json_lines(file: InputFile, text_key: str, *, head: bytes) -> bool:
    """Whether the content of a file is JSON lines. `head` are its first bytes."""
    if not head.removeprefix(BOM_UTF8).lstrip().startswith(b"{"):
        return False
    lines = map(_parsed, file.first_lines(_MAX_OBJECT_BYTES))
    first = next(lines, None)
    return isinstance(first, dict) and (text_key in first or isinstance(next(lines, None), dict))


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; None if it has none."""
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


def _require_json_lines(file: InputFile) -> None:
    """Raise DataError for a .json file that has another layout: one lost line may be all of it."""
    lines = file.first_lines(_MAX_OBJECT_BYTES)
    is_array = any(line.lstrip().startswith(b"[") for line in lines[:1])
    is_short = len(lines) < 2 or len(lines[0]) == _MAX_OBJECT_BYTES
    # One of two lines is enough: the other may be damaged, which the reader reports.
    if not is_array and (is_short or any(isinstance(_parsed(line), dict) for line in lines)):
        return
    kind = kind_of(dataset_path(file.path).parent)
    if kind in (PathKind.DATASET, PathKind.CHECKPOINT):
        raise DataError(
            f"{shown(posixpath.dirname(file.place) or '.')} is {kind}, not text to prepare. Give "
            "the text, or exclude this directory by a pattern such as 'in/**/*.txt'"
        )
    raise DataError(
        f"{shown(file.place)} does not have one JSON object per line. Convert such files and give "
        "the results: jq -c '.[]' FILE.json > FILE.jsonl for one array, jq -c . for objects over "
        "several lines. Or exclude them by a pattern such as 'in/**/*.jsonl'. To read raw JSON as "
        "text, as in source code: --format text"
    )


def _kind_of_ids(file: InputFile, rules: IdRules) -> str:
    """The kind of a file of token ids. Raises ConfigError for a raw file without --dtype."""
    suffix = file.suffix.name
    kind = next((kind for kind, each in ID_FORMATS.items() if suffix in each.suffixes), None)
    if not kind:
        raise ConfigError(
            f"{shown(file.place)}: --format ids reads {', '.join(suffixes_of('ids'))}, also with "
            ".gz, .zst, .bz2 or .xz, and not this file. Convert it, or rename it to the suffix of "
            "its format."
        )
    if kind == "json":
        lines = file.first_lines(HEAD_BYTES)
        is_jsonl = len(lines) == 2 and all(line.lstrip().startswith(b"{") for line in lines)
        return "jsonl" if is_jsonl else "json"
    if kind != "bin":
        return kind
    index = index_path(file.path)
    if InputFile(index, index).first_bytes(len(MAGIC)) == MAGIC:
        return "megatron"
    if int.from_bytes(file.first_bytes(4), "little") in _LLMC_NUMBERS:
        raise DataError(
            f"{shown(file.place)} is a file of llm.c, whose header would be read as ids; it is not "
            "read. Drop the header of a token shard: tail -c +1025 FILE.bin > IDS.bin; and give "
            "--dtype uint16, or uint32 for the vocabulary of Llama 3."
        )
    if not rules.dtype:
        raise ConfigError(
            f"{shown(file.place)} has no header, so it is read as raw integers, whose type is "
            "not in the file. Give it: --dtype uint16 (or uint32, int32, ...)"
        )
    return kind


# --- reading the records of a file ----------------------------------------------------------------


def scan_ranges(file: InputFile, unit_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges [start, stop) of about `unit_bytes` that can be read independently, in order.

    A record belongs to the range that contains its first byte. A file that cannot be cut is one
    range. There is at least one range.
    """
    is_plain = not (file.compression or scheme_of(file.path))
    if not (is_plain and format_of(file).by_range and file.size):
        return [(0, file.size)]
    starts = range(0, file.size, unit_bytes)
    return [(start, min(start + unit_bytes, file.size)) for start in starts]


def read_records(source: Source) -> Iterator[Record | Reject]:
    """The records whose first byte is in the range of `source`, one of `scan_ranges`, in order.

    A bad record is a Reject. Raises UnfinishedError if a disk or server fails temporarily, and
    DataError for a local file that has changed since it was listed.
    """
    file = source.file
    if source.stop >= file.size:
        source.stop = math.inf
    try:
        with file.open() as source.stream:
            yield from format_of(file).read(source)
    except (BrokenStreamError, OSError) as error:
        broken = BrokenStreamError(reject_reason(error)) if isinstance(error, OSError) else error
        if is_transient(error):
            raise UnfinishedError(
                f"{shown(file.place)}: {broken.reason}. Finished work is kept; run the same "
                "command again when the disk or network works."
            ) from error
        line, source.lines = broken.line or source.lines, 0
        yield Reject(file.name, line, broken.byte, broken.reason, loses_rest=True)
    # The records of a file that changed may be of both versions. One without a mark could not be
    # examined, and one that is missing has been rejected.
    is_marked = file.mark and not (file.archive or scheme_of(file.path))
    with contextlib.suppress(FileNotFoundError):
        if is_marked and mark_of(file.path, *file.next_paths) != file.mark:
            raise DataError(
                f"{shown(file.path)} changed while it was being read. Nothing was written. Run "
                "the command again when no other process writes to the input."
            )
