"""The kind of a file: decided by its suffix, and by its first bytes where the suffix is ambiguous.

`--format auto` ignores a suffix of compression (.gz, .gzip, .zst, .zstd, .bz2, .xz) and then
decides by

1. the `suffixes` of `FORMATS`. The formats that are not `in_folders`, tar and csv, are only read
   by name or pattern. .parquet and .arrow files with "wiki" in their path, or with a recipe of
   WikiText, are wikitext_rows if their rows are lines of WikiText.
2. the first bytes: jsonl if the first line that is not blank is a JSON object with the key
   `--text-key`, or if the first two are JSON objects; wikitext if the suffix is .tokens or "wiki"
   is in the name, and that line is ` = Title = `; binary (`lines.py`); else text. Of files at URLs,
   only those with a suffix of `_UNTYPED` or a name of WikiText are examined: each takes a request.

The kinds `lines` and `blank_lines` are never chosen automatically. In a folder or pattern,
`--format jsonl` reads the files that auto would read as jsonl.

`--format ids` decides by the `suffixes` of `ID_FORMATS`, for .bin files also by an index next to
the file (`megatron.py`), and for .json files by the first bytes.
"""

import json
import os
import posixpath
from codecs import BOM_UTF8
from dataclasses import replace
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers.formats import (
    FORMATS,
    ID_FORMATS,
    Format,
    Kind,
    must_spill,
    suffixes_of,
)
from data_pipeline.readers.input_file import InputFile, index_path
from data_pipeline.readers.lines import HEAD_BYTES, is_binary
from data_pipeline.readers.records import IdRules
from data_pipeline.readers.wikitext import has_wikitext_rows, is_title
from data_pipeline.system.sources import file_system, retry_request, scheme_of, shown

_MAX_OBJECT_BYTES = 16 * 2**20
"""Bytes of a line that is examined to decide whether a file is JSON lines."""
_UNTYPED = ("", ".jl", ".wet", ".warc", ".wat")
"""Suffixes whose content is examined also at URLs. .jl: JSON lines, or source code in Julia."""
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
    kind = rules.format
    if rules.ids:
        kind = _kind_of_ids(file, rules.ids)
    elif kind == "auto":
        kind = _kind_of(file, rules, in_folder=in_folder)
    if kind == "jsonl" and file.suffix.name == ".json":
        _require_json_lines(file)
    file = replace(file, kind=kind, ids=rules.ids, keeps_nul=rules.format == "text")
    if kind == "megatron" and not (scheme_of(file.path) or file.archive):
        status = os.stat(index_path(file.path))  # noqa: PTH116 - as in addresses.py
        file = replace(file, mark=f"{file.mark} {status.st_size} {status.st_mtime_ns}")
    return replace(file, is_spilled=must_spill(file))


def _kind_of(file: InputFile, rules: KindRules, *, in_folder: bool) -> Kind:
    """The kind of a file for "auto"; see the module docstring."""
    suffix = file.suffix
    for kind, file_format in FORMATS.items():
        if suffix.name in file_format.suffixes and (file_format.in_folders or not in_folder):
            may_have_lines = kind in ("parquet", "arrow") and not suffix.packed
            may_be_wikitext = rules.is_wikitext or "wiki" in file.place.lower()
            if may_have_lines and may_be_wikitext and has_wikitext_rows(file, rules.text_key):
                return "wikitext_rows"
            return kind
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
    # One of two lines is enough: the other may be damaged, which the reader reports.
    may_be_lines = len(lines) < 2 or len(lines[0]) == _MAX_OBJECT_BYTES
    may_be_lines = may_be_lines or any(isinstance(_parsed(line), dict) for line in lines)
    if may_be_lines and not is_array:
        return
    layout, filter = (
        ("one JSON array", "'.[]'") if is_array else ("an object over several lines", ".")
    )
    raise DataError(
        f"{shown(file.place)} is {layout}, not one object per line. Convert such files and give "
        f"the results: jq -c {filter} FILE.json > FILE.jsonl. Or exclude them by a pattern such as "
        "'in/**/*.jsonl'. To read raw JSON as text, as in source code: --format text"
    )


def _kind_of_ids(file: InputFile, rules: IdRules) -> Kind:
    """The kind of a file of token ids. Raises ConfigError for a raw file without --dtype."""
    suffix = file.suffix
    kinds = (kind for kind, each in ID_FORMATS.items() if suffix.name in each.suffixes)
    kind = next(kinds, None)
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
    if _has_index(file.path):
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


def _has_index(path: str) -> bool:
    """Whether the .bin file at `path` and an index are a pair."""
    other = index_path(path)
    if not scheme_of(path):
        return os.path.exists(other)  # noqa: PTH110 - as the other checks of listed files
    system = file_system(other)
    return bool(retry_request(lambda: system.exists(other)))
