"""Find the input files of paths, folders, patterns, archives and URLs, in a fixed order.

`addresses.py` lists the files at an address, `unpack.py` unpacks archives, `formats.py` decides the
kind of each file, `split_names.py` the split that its name gives. This module decides which files
are read, and makes their names distinct: they are the ids of documents.

**Descriptions** of a corpus are left out: the JSON files, cached results of `map` and locks of
`datasets` (an .arrow file that state.json does not list is such a result); unfinished downloads,
backups of editors, the marks of Hadoop and Spark (_SUCCESS); in the cache of `huggingface_hub` the
blobs/ and refs/ to which its snapshots/ are links; and metadata.csv of PG-19.

Sources: datasets, `Dataset.save_to_disk`, `DatasetDict.save_to_disk` and `DatasetBuilder`;
github.com/google-deepmind/pg19.
"""

import os
import posixpath
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.readers.addresses import (
    expand_braces,
    is_pattern,
    list_files,
    list_local,
    name_in_utf8,
    parse_input,
    require_all_named,
    split_archive,
    walk,
)
from data_pipeline.readers.formats import (
    FORMATS,
    KindRules,
    holds_json_lines,
    suffixes_of,
    with_kind,
)
from data_pipeline.readers.source import ANY_ARCHIVE, ARCHIVES, IdRules, InputFile
from data_pipeline.readers.split_names import with_splits_of_names
from data_pipeline.readers.text import HEAD_BYTES, name_of_shards, next_shard
from data_pipeline.readers.unpack import UNPACKED, holds_samples, unpack
from data_pipeline.system.sources import scheme_of, shown
from data_pipeline.system.strict_json import parse_json

_NOT_TEXT = {
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".ico", ".tif", ".tiff"),
    *(".mp3", ".ogg", ".wav", ".flac", ".mp4", ".mkv", ".avi", ".webm", ".mov"),
    *(".ttf", ".otf", ".woff", ".woff2", ".pyc", ".so", ".o", ".a", ".exe", ".dll"),
    *ANY_ARCHIVE,
}
"""Suffixes of files that are ignored in folders, and counted. All other files must be UTF-8."""
_MAX_STATE_BYTES = 16 * 2**20
_NO_DATA = re.compile(
    r"(?P<kind>(?:^|(?<=/))(?:dataset_(?:infos?|dict)\.json|metadata\.[ct]sv|_SUCCESS|_temporary"
    r"|_(?:common_)?metadata)|\.(?:incomplete|part|partial|crdownload|tmp|swp)|~)(?:/|$)"
)
"""Also a folder: `0.0.0.incomplete/a.arrow`, `_temporary/0/part-0`."""
_CACHED_RESULT = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")
_HUB_COPY = re.compile(r"(?:^|/)(?:datasets|models)--[^/]+/(?:blobs|refs)/")


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files in reading order, each with its kind, and the ignored files."""

    files: list[InputFile]
    ignored: Counter[str]
    """Number of ignored files by suffix; of those that describe a corpus, by name."""
    are_named: bool = False
    """Whether the inputs were given as NAME=ADDRESS, which decides the split of every file."""

    @property
    def read_as(self) -> dict[str, dict[str, int]]:
        """Number of files by kind and suffix."""
        counts: dict[str, dict[str, int]] = {}
        for file in sorted(self.files, key=lambda file: (file.kind, str(file.suffix))):
            suffixes, suffix = counts.setdefault(file.kind, {}), str(file.suffix)
            suffixes[suffix] = suffixes.get(suffix, 0) + 1 + len(file.next_paths)
        return counts


def find_files(
    inputs: list[str],
    *,
    format: str,
    out: Path,
    ids: IdRules | None = None,
    text_key: str = "text",
    is_wikitext: bool = False,
) -> InputFiles:
    """The files to read: all inputs in order, the files of each sorted by path, no hidden files.

    `format` is that of `KindRules`, and `ids` is given if and only if it is "ids". An input is an
    address, or NAME=ADDRESS with the split of its files. Otherwise the files have
    the splits that their names give (`split_names.py`). An archive that is given by name or pattern
    is unpacked in `out` / UNPACKED, where the files must stay until they are read, and
    ARCHIVE/ADDRESS selects files in it.

    The name of a file is relative to its input. If files of several inputs then have the same name,
    all names are relative to the deepest folder that contains all files.

    Folders are walked recursively, through links but never twice into the same folder, and not into
    `out`, the directory of the dataset.
    Raises DataError for a missing input, an input without text, JSON that is not JSON lines, and
    two files with the same name; ConfigError for a URL of an unsupported scheme.
    """
    search = _Search(KindRules(format, ids, text_key, is_wikitext), out)
    named = [parse_input(each) for each in inputs]
    require_all_named([split for split, _ in named], inputs)
    pairs = [(split, each) for split, address in named for each in expand_braces(address)]
    are_named = any(split for split, _ in named)
    try:
        by_input = [search.files_of(address) for _, address in pairs]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from error
    if are_named:
        files = [
            replace(file, split=split)
            for (split, _), of_input in zip(pairs, by_input, strict=True)
            for file in of_input
        ]
    else:
        files = with_splits_of_names(by_input)
    files = _with_distinct_names(_with_joined_shards(files))
    _reject_ambiguous_names(files)
    return InputFiles(files, search.ignored, are_named)


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the files of inputs, and remembers what it ignores and unpacks."""

    rules: KindRules
    out: Path
    ignored: Counter[str] = field(default_factory=Counter)
    unpacked: dict[str, Path] = field(default_factory=dict)
    """The folder to which every archive was unpacked, by its path."""

    def files_of(self, address: str) -> list[InputFile]:
        """The files of one input, each with its kind."""
        archive, inner = (address, "") if self.rules.format == "tar" else split_archive(address)
        files, is_file = list_files(archive, self.out)
        if not files and list_files(archive, self.out / UNPACKED)[0]:
            raise DataError(
                f"{shown(address)}: all files are in the directory of --out, which is not read. "
                "Choose another --out."
            )
        in_folder = not is_file and not is_pattern(address)
        if is_file and files[0].suffix.name in ANY_ARCHIVE.difference(ARCHIVES):
            raise ConfigError(
                f"{shown(archive)}: such archives are not unpacked here. Unpack it and give the "
                "folder; .zip and .tar archives are read, .gz, .zst, .bz2 and .xz files "
                "decompressed."
            )
        if not is_file:
            files = self._data_files(files, address, in_folder=in_folder)
        read: list[InputFile] = []
        for file in files:
            if not in_folder and self._is_unpacked(file, inner):
                read += self._files_in_archive(file, inner)
            else:
                read.append(with_kind(file, self.rules, in_folder=in_folder))
        return read

    def _data_files(
        self, files: list[InputFile], address: str, *, in_folder: bool
    ) -> list[InputFile]:
        """The files at an address without those that are ignored, which it counts."""
        files = [
            file
            for file in _only_data_files(files, self.ignored)
            if not self._is_ignored(file, in_folder=in_folder)
        ]
        if not files:
            place = "matches this" if is_pattern(address) else "in it"
            counts = ", ".join(f"{n} {printable(name)}" for name, n in (+self.ignored).items())
            ignored = f" (ignored: {counts})" if counts else ""
            format = self.rules.format
            suffixes = "" if format == "auto" else ", ".join(suffixes_of(format))
            implied = " (or a --tokenizer of ids)" * (format == "ids")
            cause = f"--format {format}{implied} reads only {suffixes}. " if suffixes else ""
            raise DataError(
                f"{shown(address)}: no text {place}{ignored}. {cause}Give a folder, archive or "
                "pattern with text, .jsonl or .parquet files; a pattern matches files, ** matches "
                "folders of any depth."
            )
        return files

    def _is_ignored(self, file: InputFile, *, in_folder: bool) -> bool:
        """Whether a file in a folder is ignored; if so, counts it."""
        suffix, format = file.suffix, self.rules.format
        if not in_folder and suffix.name in ARCHIVES and (suffix.name == ".tar" or format != "tar"):
            return False
        wanted = () if format == "auto" else suffixes_of(format)
        parquet = () if format in ("auto", "parquet") else FORMATS["parquet"].suffixes
        is_binary = suffix.name in _NOT_TEXT or suffix.name in parquet
        skip = suffix.name not in wanted if wanted else is_binary
        if skip and format == "jsonl" and not is_binary:
            head = file.first_bytes(HEAD_BYTES)
            skip = not holds_json_lines(file, self.rules.text_key, head=head)
        self.ignored[str(suffix)] += skip
        return skip

    def _is_unpacked(self, file: InputFile, inner: str) -> bool:
        """Whether a file is an archive that is read as a folder; always for an address inside."""
        rules, suffix = self.rules, file.suffix.name
        if suffix not in ARCHIVES or rules.format == "tar":
            return False
        if rules.format not in ("auto", "ids") or suffix == ".zip" or inner:
            return True
        return not holds_samples(file, rules.text_key, is_ids=rules.ids is not None)

    def _files_in_archive(self, archive: InputFile, inner: str) -> list[InputFile]:
        """The files of an archive, or those at an address inside it, each with its kind."""
        unpack_in = (self.out / UNPACKED).absolute()  # workers may have another current folder
        if archive.path not in self.unpacked:
            self.unpacked[archive.path] = unpack(archive, unpack_in / str(len(self.unpacked)))
        root = self.unpacked[archive.path]
        names, listed = walk(root, self.out), list_local(root, inner, self.out)
        address = f"{archive.path}/{inner}".removesuffix("/")
        if not listed:
            shown_names = ", ".join(map(printable, names[:5]))
            raise DataError(f"{shown(address)}: no such file in the archive. It has: {shown_names}")
        files = [
            replace(
                file,
                mark=archive.mark,
                archive=archive.path,
                member=os.path.relpath(file.path, unpack_in).partition("/")[2],
            )
            for file in listed[0]
        ]
        files = self._data_files(files, address, in_folder=True)
        # The only file of an archive is read as one that is given by name.
        return [with_kind(file, self.rules, in_folder=len(names) > 1) for file in files]


# --- files that are no data -----------------------------------------------------------------------


def _only_data_files(files: list[InputFile], ignored: Counter[str]) -> list[InputFile]:
    """`files` without descriptions of the corpus (see the module docstring), which it counts.

    Raises DataError for a missing data file of a saved dataset.
    """
    names = {file.name for file in files}
    arrow_folders = {posixpath.dirname(name) for name in names if name.endswith(".arrow")}
    listed: dict[str, set[str]] = {}  # the data files of every folder of a saved dataset
    for file in files:
        folder, name = posixpath.split(file.name)
        if name == "state.json" and folder in arrow_folders:
            listed[folder] = _listed_files(file, folder, names)
    data_files = []
    for file in files:
        folder, name = posixpath.split(file.name)
        suffix = posixpath.splitext(name)[1]
        is_lock = suffix == ".lock" and not file.size
        is_cached = suffix == ".arrow" and file.name not in listed.get(folder, {file.name})
        if no_data := _NO_DATA.search(file.name):
            ignored[no_data["kind"]] += 1
        elif name == "state.json" and folder in listed:
            ignored[name] += 1
        elif _HUB_COPY.search(file.path):
            ignored["blobs and refs"] += 1
        elif is_lock or is_cached or _CACHED_RESULT.fullmatch(name):
            ignored[suffix] += 1
        else:
            data_files.append(file)
    return data_files


def _listed_files(state: InputFile, folder: str, names: set[str]) -> set[str]:
    """The names of the data files that state.json lists."""
    try:
        with state.open() as stream:
            content = parse_json(stream.read(_MAX_STATE_BYTES))
        listed = {posixpath.join(folder, str(each["filename"])) for each in content["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{shown(state.place)} cannot be read ({printable(str(error))[:80]}), so the files of "
            "this dataset are not known. Save it again with save_to_disk, or give its .arrow files "
            "by a pattern."
        ) from error
    if missing := sorted(listed - names):
        raise DataError(
            f"{shown(state.place)} lists {printable(missing[0])!r}, which is not in its directory. "
            "The copy is incomplete; copy it again."
        )
    return listed


# --- names of documents ---------------------------------------------------------------------------


def _with_joined_shards(files: list[InputFile]) -> list[InputFile]:
    """The files; consecutive shards whose rows are lines of one text are one file."""
    joined: list[InputFile] = []
    last_path = ""
    for file in files:
        first = joined[-1] if joined else file
        continues = file.path == next_shard(last_path) and file.split == first.split
        if first.kind == "wikitext_rows" and continues:
            joined[-1] = replace(
                first,
                name=name_of_shards(first.name),
                size=first.size + file.size,
                mark=f"{first.mark} {file.mark}",
                next_paths=(*first.next_paths, file.path),
            )
        else:
            joined.append(file)
        last_path = file.path
    return joined


def _with_distinct_names(files: list[InputFile]) -> list[InputFile]:
    """The files; if several inputs have one of the same name, with longer names for all.

    These are relative to the deepest folder that contains all files.
    """
    if len({file.name for file in files}) == len(files):
        return files
    paths = [_absolute_path(file.place).split("/") for file in files]
    folders = zip(*(parts[:-1] for parts in paths), strict=False)
    num_common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, folders))
    names = ("/".join(parts[num_common:]) for parts in paths)
    first = {file.name: file for file in reversed(files)}
    return [
        replace(
            file,
            name=name_in_utf8(name.partition("?")[0] if scheme_of(file.path) else name),
            short_name=file.name * (first[file.name] is file),
        )
        for file, name in zip(files, names, strict=True)
    ]


def _absolute_path(path: str) -> str:
    return path if scheme_of(path) else os.path.abspath(path)  # noqa: PTH100


def _reject_ambiguous_names(files: list[InputFile]) -> None:
    """Raise DataError if a file would be read twice or two files would have the same name."""
    paths = Counter(_absolute_path(path) for f in files for path in (f.place, *f.next_paths))
    path, count = paths.most_common(1)[0]
    if count > 1:
        raise DataError(f"{shown(path)} would be read twice. Give every file only once.")
    name, count = Counter(file.name for file in files).most_common(1)[0]
    if count > 1:
        places = " and ".join(shown(file.place) for file in files if file.name == name)
        raise DataError(
            f"{places} would both be document {printable(name)!r}. Give a folder that contains "
            "both, or rename one."
        )
