"""What a file is read as: by its suffix, and where a suffix does not say enough by a look inside.

What `--format auto` takes a file for, below a compression's suffix (.gz, .gzip, .zst, .zstd):

- .jsonl, .ndjson, .json: jsonl; .parquet, .pq: parquet; by the `suffixes` of `FORMATS`
- .tokens, or a name with "wiki" in it: wikitext if its first line that is not blank is a
  ` = Title = `, else text
- everything else: text. `lines` is never guessed.

A .json file that is read as jsonl must hold one object a line. An array, or an object over several
lines, is refused with the command that makes lines of it: as text it would be raw JSON.
"""

import json
import posixpath
import shlex
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from data_pipeline.errors import DataError
from data_pipeline.readers.formats import FORMATS, Format, InputFile, Kind
from data_pipeline.readers.wikitext import MAX_TITLE_BYTES, is_title
from data_pipeline.storage.open_source import Compression, open_source
from data_pipeline.storage.urls import scheme_of, shown

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}
_UNPACK = {"": "cat", "gz": "gzip -dc <", "zst": "zstd -dc <"}
_LOOK_BYTES = 2**16
"""Of a line that is looked at; a longer one is not cut by what writes JSON for people."""
_FIRST = 3


class Suffix(NamedTuple):
    """The end of a file's name, in lower case."""

    name: str
    """The suffix below the compression's."""
    packed: str
    """The compression's suffix, or nothing."""

    def __str__(self) -> str:
        return self.name + self.packed or "without suffix"

    @property
    def compression(self) -> Compression:
        return _COMPRESSIONS.get(self.packed, "")


def suffix_of(name: str) -> Suffix:
    stem, last = posixpath.splitext(name.lower())
    if last in _COMPRESSIONS:
        return Suffix(posixpath.splitext(stem)[1], last)
    return Suffix(last, "")


def kind_of(path: str, name: str, format: Format) -> Kind:
    """What `--format` has the file at `path` read as; see above for auto."""
    if format != "auto":
        return format
    suffix = suffix_of(name)
    by_suffix = next((kind for kind, about in FORMATS.items() if suffix.name in about.suffixes), "")
    if by_suffix:
        return by_suffix
    may_be_wikitext = suffix.name == ".tokens" or "wiki" in posixpath.basename(name).lower()
    first = _first_lines(path, suffix.compression, MAX_TITLE_BYTES + 1) if may_be_wikitext else []
    return "wikitext" if first and is_title(first[0]) else "text"


def require_json_lines(files: list[InputFile]) -> None:
    """Raises DataError for .json files that are read as jsonl and are other JSON."""
    looked_at = [file for file in files if _may_be_other_json(file)]
    refused = {file.path: shape for file in looked_at if (shape := _other_shape(file))}
    if not refused:
        return
    lines = [
        f"\n  {_to_json_lines(file, refused[file.path])}"
        for file in looked_at
        if file.path in refused
    ]
    path, shape = next(iter(refused.items()))
    more = f"\n  and {len(lines) - _FIRST} more" if len(lines) > _FIRST else ""
    raise DataError(
        f"{shown(path)} is {shape}, not one object per line; so are {len(refused)} of "
        f"{len(looked_at)} .json files. Make JSON lines of it and give those:"
        f"{''.join(lines[:_FIRST])}{more}\nOr leave it out by a pattern, such as 'in/**/*.jsonl'. "
        "To read raw JSON as text, as in source code: --format text"
    )


def _may_be_other_json(file: InputFile) -> bool:
    return file.kind == "jsonl" and suffix_of(file.name).name == ".json"


def _other_shape(file: InputFile) -> str:
    """What the file is instead of JSON lines; "" for those, and for what the reader will reject."""
    lines = _first_lines(file.path, file.compression, _LOOK_BYTES)
    first = lines[0].lstrip() if lines else b""
    if first.startswith(b"["):
        return "one JSON array"
    if not first.startswith(b"{") or len(lines) < 2 or len(lines[0]) == _LOOK_BYTES:
        return ""
    # Either of two, for in JSON lines too the first may be damaged; the reader reports that.
    return "" if any(map(_is_object, lines)) else "an object over several lines"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8", errors="replace")), dict)
    except (ValueError, RecursionError):
        return False


def _first_lines(path: str, compression: Compression, size: int) -> list[bytes]:
    """The first two lines that are not blank, cut at `size` bytes; none if reading fails."""
    try:
        with open_source(path, compression) as stream:
            lines: Iterator[bytes] = iter(lambda: stream.readline(size), b"")
            unmarked = (line.removeprefix(b"\xef\xbb\xbf") for line in lines)
            return list(islice((line for line in unmarked if line.strip()), 2))
    except OSError:  # reading the file will say why
        return []


def _to_json_lines(file: InputFile, shape: str) -> str:
    """The command that writes the file as JSON lines into the same folder."""
    path = posixpath.basename(file.path) if scheme_of(file.path) else file.path
    suffix = suffix_of(path)
    stem = path[: len(path) - len(suffix.name + suffix.packed)]
    source, target = shlex.quote(path), shlex.quote(f"{stem}.jsonl")
    filter = "'.[]'" if "array" in shape else "."
    return f"{_UNPACK[suffix.compression]} {source} | jq -c {filter} > {target}"
