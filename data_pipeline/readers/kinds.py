"""The kind of a file: decided by its suffix, and by its first lines where the suffix is ambiguous.

`--format auto` ignores a suffix of compression (.gz, .gzip, .zst, .zstd) and then decides:

- .jsonl, .ndjson, .json: jsonl; .parquet, .pq: parquet; .arrow: arrow (the `suffixes` of `FORMATS`)
- .tar, .tgz: tar; .csv, .tsv, .tab: csv; only if given by name or pattern. In folders, archives are
  ignored, and the others are text.
- .tokens, or "wiki" in the name: wikitext if the first line that is not blank is ` = Title = `,
  else text
- all other files: text. The kind `lines` is never chosen automatically.

`--format ids` decides by the `suffixes` of `ID_FORMATS`. A .bin file with an .idx file is megatron,
one with the header of llm.c is llm.c; an .npy file without a header, but with a .csv.gz file, is
olmo; and a .json file with an object on each of its first two lines is jsonl.

A .json file must have one object per line. An array, or an object over several lines, is refused
with the command that converts it, because as text it would be raw JSON.
"""

import json
import posixpath
import shlex
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.readers.formats import (
    FORMATS,
    ID_FORMATS,
    Format,
    InputFile,
    Kind,
    suffixes_of,
)
from data_pipeline.readers.id_files import NPY_MAGIC, SHARD_MAGICS, first_bytes, has_index
from data_pipeline.readers.wikitext import MAX_TITLE_BYTES, is_title
from data_pipeline.storage.open_source import Compression, open_source
from data_pipeline.storage.urls import scheme_of, shown

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}
_UNPACK = {"": "cat", "gz": "gzip -dc <", "zst": "zstd -dc <"}
_MAX_LINE_BYTES = 2**16
"""Bytes of a line that are examined. Pretty-printed JSON has no longer lines."""
_MAX_LISTED = 3


class Suffix(NamedTuple):
    """The suffix of a file name in lower case, split at the compression."""

    name: str
    """The suffix without that of the compression."""
    packed: str
    """The suffix of the compression, or an empty string."""

    def __str__(self) -> str:
        return self.name + self.packed or "without suffix"

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.packed, "")


def suffix_of(name: str) -> Suffix:
    stem, last = posixpath.splitext(name.lower())
    if last == ".tgz":
        return Suffix(".tar", ".gz")
    if last in _COMPRESSIONS:
        return Suffix(posixpath.splitext(stem)[1], last)
    return Suffix(last, "")


def kind_of(path: str, name: str, format: Format, *, in_folder: bool = False) -> Kind:
    """The kind of the file at `path` for a `--format`; see the module docstring for "auto"."""
    suffix = suffix_of(name)
    if format == "ids":
        return _kind_of_ids(path, name)
    if format != "auto":
        return format
    for kind, file_format in FORMATS.items():
        if suffix.name in file_format.suffixes and (file_format.in_folders or not in_folder):
            return kind
    may_be_wikitext = suffix.name == ".tokens" or "wiki" in posixpath.basename(name).lower()
    first = _first_lines(path, suffix.compression, MAX_TITLE_BYTES + 1) if may_be_wikitext else []
    return "wikitext" if first and is_title(first[0]) else "text"


def _kind_of_ids(path: str, name: str) -> Kind:
    suffix = suffix_of(name)
    kinds = (kind for kind, each in ID_FORMATS.items() if suffix.name in each.suffixes)
    kind = next(kinds, None)
    if not kind:
        raise ConfigError(
            f"{shown(path)}: --format ids reads {', '.join(suffixes_of('ids'))}, also with .gz or "
            ".zst, and not this file. Convert it, or rename it to the suffix of its format."
        )
    if kind == "bin":
        if has_index(path):
            return "megatron"
        magic = first_bytes(path, suffix.compression, 4)
        return "llm.c" if int.from_bytes(magic, "little") in SHARD_MAGICS else kind
    if kind == "npy" and has_index(path):
        return kind if first_bytes(path, "", 6) == NPY_MAGIC else "olmo"
    if kind == "json":
        lines = _first_lines(path, suffix.compression, _MAX_LINE_BYTES)
        if len(lines) == 2 and all(line.lstrip().startswith(b"{") for line in lines):
            return "jsonl"
    return kind


def require_json_lines(files: list[InputFile]) -> None:
    """Raise DataError for .json files that are to be read as jsonl and have another layout."""
    json_files = [f for f in files if f.kind == "jsonl" and suffix_of(f.name).name == ".json"]
    refused = [(file, layout) for file in json_files if (layout := _other_layout(file))]
    if not refused:
        return
    file, layout = refused[0]
    commands = [f"\n  {_conversion_command(*each)}" for each in refused[:_MAX_LISTED]]
    more = f"\n  and {len(refused) - _MAX_LISTED} more" if len(refused) > _MAX_LISTED else ""
    raise DataError(
        f"{shown(file.path)} is {layout}, not one object per line; so are {len(refused)} of "
        f"{len(json_files)} .json files. Convert them to JSON lines and give those:"
        f"{''.join(commands)}{more}\nOr exclude them by a pattern such as 'in/**/*.jsonl'. To read "
        "raw JSON as text, as in source code: --format text"
    )


def _other_layout(file: InputFile) -> str:
    """The layout of a file that is not JSON lines; "" for JSON lines and for damaged files."""
    lines = _first_lines(file.path, file.compression, _MAX_LINE_BYTES)
    first = lines[0].lstrip() if lines else b""
    if first.startswith(b"["):
        return "one JSON array"
    if not first.startswith(b"{") or len(lines) < 2 or len(lines[0]) == _MAX_LINE_BYTES:
        return ""
    # One of the two lines is enough: the other may be damaged, which the reader reports.
    return "" if any(map(_is_object, lines)) else "an object over several lines"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8", errors="replace")), dict)
    except (ValueError, RecursionError):
        return False


def _first_lines(path: str, compression: Compression, size: int) -> list[bytes]:
    """The first two lines that are not blank, cut to `size` bytes; none if reading fails."""
    try:
        with open_source(path, compression) as stream:
            lines: Iterator[bytes] = iter(lambda: stream.readline(size), b"")
            unmarked = (line.removeprefix(b"\xef\xbb\xbf") for line in lines)
            return list(islice((line for line in unmarked if line.strip()), 2))
    except OSError:  # the reader reports the error
        return []


def _conversion_command(file: InputFile, layout: str) -> str:
    """The shell command that converts the file to JSON lines in the same folder."""
    path = posixpath.basename(file.path) if scheme_of(file.path) else file.path
    suffix = suffix_of(path)
    stem = path[: len(path) - len(suffix.name + suffix.packed)]
    source, target = shlex.quote(path), shlex.quote(f"{stem}.jsonl")
    filter = "'.[]'" if "array" in layout else "."
    return f"{_UNPACK[suffix.compression]} {source} | jq -c {filter} > {target}"
