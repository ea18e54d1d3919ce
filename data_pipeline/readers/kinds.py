"""The kind of a file: decided by its suffix, and by its first bytes where the suffix is ambiguous.

`--format auto` ignores a suffix of compression (.gz, .gzip, .zst, .zstd, .bz2, .xz) and then
decides by

1. the `suffixes` of `FORMATS`. The formats that are not `in_folders`, tar and csv, are only read
   by name or pattern. .parquet and .arrow files with "wiki" in their path, or with a recipe of
   WikiText, are wikitext_rows if their rows are lines of WikiText.
2. the first bytes: jsonl if the first line that is not blank is a JSON object with the key
   `--text-key`, or if the first two are JSON objects; wikitext if the suffix is .tokens or "wiki"
   is in the name, and that line is ` = Title = `; binary (`lines.py`); else text. Of files at URLs,
   only those without suffix, with .jl or a name of WikiText are examined: each takes a request.

The kinds `lines` and `blank_lines` are never chosen automatically. In a folder or pattern,
`--format jsonl` reads the files that auto would read as jsonl.

`--format ids` decides by the `suffixes` of `ID_FORMATS`, for .bin files also by an index next to
the file (`ids.py`), and for .json files by the first bytes.

Inputs of `_REMOVED` would be read as something else, or ignored in a folder; they are refused.
"""

import json
import os
import posixpath
import re
from codecs import BOM_UTF8
from dataclasses import replace
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers.formats import (
    FORMATS,
    ID_FORMATS,
    Format,
    InputFile,
    Kind,
    Suffix,
    must_spill,
    suffix_of,
    suffixes_of,
)
from data_pipeline.readers.lines import HEAD_BYTES, is_binary
from data_pipeline.readers.records import BrokenStreamError, IdRules
from data_pipeline.readers.wikitext import has_wikitext_rows, is_title
from data_pipeline.system.sources import scheme_of, shown

_MAX_LINE_BYTES = 2**16
"""Bytes of a line that are examined. Pretty-printed JSON has no longer lines."""
_MAX_OBJECT_BYTES = 16 * 2**20
"""Bytes of a line that is examined to decide whether a file is JSON lines."""
_UNTYPED = ("", ".jl")
"""Suffixes that say nothing about the content. .jl: JSON lines, or source code in Julia."""
_REMOVED = {
    "WARC": (
        "an archive of web pages",
        "Write its texts as JSON lines: docs/removed.md has the lines of Python",
    ),
    "OSCAR": (
        "the metadata of OSCAR 21.09",
        "Give the texts by a pattern: 'DIRECTORY/*.txt.gz' --format blank_lines",
    ),
    "npz": (
        "an archive of arrays",
        "In Python: for name, ids in numpy.load('IDS.npz').items(): numpy.save(name, ids)",
    ),
    "llm.c": (
        "a file of llm.c, whose header would be read as ids",
        "Drop the header of a token shard: tail -c +1025 FILE.bin > IDS.bin; and give --dtype "
        "uint16, or uint32 for the vocabulary of Llama 3",
    ),
}
"""Inputs that are not read (docs/removed.md): what they are, and what to do instead."""
_OSCAR_METADATA = re.compile(r"[a-z]{2,3}_meta(_part_\d+)?\.jsonl(\.gz)?")
_LLMC_NUMBERS = (20240520, 20240522, 20240801)
"""First int32 of the files of llm.c and modded-nanogpt, whose headers have 1,024 bytes."""


class KindRules(NamedTuple):
    """The options that decide the kinds of files."""

    format: Format
    ids: IdRules | None
    """Given if and only if the format is "ids"."""
    text_key: str
    is_wikitext: bool
    """Whether a recipe of WikiText is given."""


def with_kind(file: InputFile, rules: KindRules, *, in_folder: bool) -> InputFile:
    """The file with its kind, and with all that follows from it."""
    if rules.ids:
        file = _with_ids(replace(file, kind=_kind_of_ids(file)), rules.ids)
    else:
        kind = rules.format
        if kind == "auto":
            kind = _kind_of(file, rules, in_folder=in_folder)
        file = replace(file, kind=kind, keeps_nul=rules.format == "text")
    return replace(file, is_spilled=True) if must_spill(file) else file


def _kind_of(file: InputFile, rules: KindRules, *, in_folder: bool) -> Kind:
    """The kind of a file for "auto"; see the module docstring."""
    suffix = suffix_of(file.name)
    is_metadata = _OSCAR_METADATA.fullmatch(posixpath.basename(file.name))
    if is_metadata and file.first_bytes(10) == b'{"headers"':
        raise _removed(file, "OSCAR")
    for kind, file_format in FORMATS.items():
        if suffix.name in file_format.suffixes and (file_format.in_folders or not in_folder):
            may_have_lines = kind in ("parquet", "arrow") and not suffix.compression
            may_be_wikitext = rules.is_wikitext or "wiki" in file.place.lower()
            if may_have_lines and may_be_wikitext and _holds_wikitext_rows(file, rules.text_key):
                return "wikitext_rows"
            return kind
    return _kind_of_content(file, suffix, rules.text_key)


def _kind_of_content(file: InputFile, suffix: Suffix, text_key: str) -> Kind:
    name = posixpath.basename(file.name).lower()
    may_be_wikitext = suffix.name == ".tokens" or "wiki" in name
    if suffix.name in (".wet", ".warc", ".wat"):
        raise _removed(file, "WARC")
    if scheme_of(file.path) and not may_be_wikitext and suffix.name not in _UNTYPED:
        return "text"
    head = file.first_bytes(HEAD_BYTES)
    if head.startswith(b"WARC/1."):
        raise _removed(file, "WARC")
    if holds_json_lines(file, text_key, head=head):
        return "jsonl"
    lines = head.removeprefix(BOM_UTF8).split(b"\n") if may_be_wikitext else []
    if is_title(next(filter(bytes.strip, lines), b"")):
        return "wikitext"
    return "binary" if is_binary(head) else "text"


def _holds_wikitext_rows(file: InputFile, text_key: str) -> bool:
    try:
        with file.open() as stream:
            return has_wikitext_rows(file.source(stream, text_key))
    except (OSError, BrokenStreamError):  # the reader reports it
        return False


def _removed(file: InputFile, name: str) -> DataError:
    content, instead = _REMOVED[name]
    return DataError(f"{shown(file.place)} is {content}; it is not read. {instead}.")


def holds_json_lines(file: InputFile, text_key: str, *, head: bytes | None = None) -> bool:
    """Whether the content of a file is JSON lines. `head` are its first bytes if they are known."""
    head = file.first_bytes(HEAD_BYTES) if head is None else head
    if not head.removeprefix(BOM_UTF8).lstrip().startswith(b"{"):
        return False
    lines = map(_parsed, file.first_lines(_MAX_OBJECT_BYTES))
    first = next(lines, None)
    if not isinstance(first, dict):
        return False
    return text_key in first or isinstance(next(lines, None), dict)


def require_json_lines(files: list[InputFile]) -> None:
    """Raise DataError for a .json file that is to be read as jsonl and has another layout."""
    for file in files:
        if file.kind != "jsonl" or suffix_of(file.name).name != ".json":
            continue
        if layout := _other_layout(file):
            filter = "'.[]'" if "array" in layout else "."
            raise DataError(
                f"{shown(file.place)} is {layout}, not one object per line. Convert such files and "
                f"give the results: jq -c {filter} FILE.json > FILE.jsonl. Or exclude them by a "
                "pattern such as 'in/**/*.jsonl'. To read raw JSON as text, as in source code: "
                "--format text"
            )


def _other_layout(file: InputFile) -> str:
    """The layout of a file that is not JSON lines; "" for JSON lines and for damaged files."""
    lines = file.first_lines(_MAX_LINE_BYTES)
    first = lines[0].lstrip() if lines else b""
    if first.startswith(b"["):
        return "one JSON array"
    if not first.startswith(b"{") or len(lines) < 2 or len(lines[0]) == _MAX_LINE_BYTES:
        return ""
    # One of the two lines is enough: the other may be damaged, which the reader reports.
    objects = [line for line in lines if isinstance(_parsed(line), dict)]
    return "" if objects else "an object over several lines"


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; None if it has none."""
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


# --- token ids ------------------------------------------------------------------------------------


def _kind_of_ids(file: InputFile) -> Kind:
    from data_pipeline.readers.ids import has_index

    suffix = suffix_of(file.name)
    if suffix.name == ".npz":
        raise _removed(file, "npz")
    kinds = (kind for kind, each in ID_FORMATS.items() if suffix.name in each.suffixes)
    kind = next(kinds, None)
    if not kind:
        raise ConfigError(
            f"{shown(file.place)}: --format ids reads {', '.join(suffixes_of('ids'))}, also with "
            ".gz, .zst, .bz2 or .xz, and not this file. Convert it, or rename it to the suffix of "
            "its format."
        )
    if kind == "bin":
        if has_index(file.path):
            return "megatron"
        if int.from_bytes(file.first_bytes(4), "little") in _LLMC_NUMBERS:
            raise _removed(file, "llm.c")
    if kind == "json":
        lines = file.first_lines(_MAX_LINE_BYTES)
        if len(lines) == 2 and all(line.lstrip().startswith(b"{") for line in lines):
            return "jsonl"
    return kind


def _with_ids(file: InputFile, rules: IdRules) -> InputFile:
    """`file` with the rules for its ids. Raises ConfigError for a raw file without --dtype."""
    from data_pipeline.readers.ids import index_path, stored_dtype

    dtype, mark, is_plain = "", file.mark, not (file.compression or scheme_of(file.path))
    if file.kind == "bin":
        dtype = rules.dtype
        if not dtype:
            raise ConfigError(
                f"{shown(file.place)} has no header, so it is read as raw integers, whose type is "
                "not in the file. Give it: --dtype uint16 (or uint32, int32, ...)"
            )
    elif is_plain:
        dtype = stored_dtype(file.kind, file.path)
    if file.kind == "megatron" and is_plain and not file.archive:
        status = os.stat(index_path(file.path))  # noqa: PTH116 - as in addresses.py
        mark = f"{mark} {status.st_size} {status.st_mtime_ns}"
    return replace(file, ids=replace(rules, dtype=dtype), mark=mark)
