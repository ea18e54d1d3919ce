"""Layouts of published corpora: which files of a folder are data, and which describe it.

`datasets.save_to_disk`:

    state.json                    names the data files
    dataset_info.json             a description
    data-00000-of-00002.arrow     the data
    cache-0123456789abcdef.arrow  results of `map` on the loaded dataset, which are not part of it
    dataset_dict.json             a DatasetDict: every split is a directory

The cache of `datasets` is the same without state.json, and with locks and unfinished downloads:

    0.0.0/HASH/wikitext-train-00000-of-00002.arrow
    0.0.0/HASH_builder.lock
    0.0.0/HASH.incomplete/

The cache of `huggingface_hub`: snapshots/REVISION/... are links to blobs/HASH; refs/main is a name
of a revision.

OSCAR 21.09, whose documents are separated by blank lines:

    en/en_part_1.txt.gz
    en/en_meta_part_1.jsonl.gz    a description of each document
    en/en_sha256.txt

PG-19: a folder per split, and metadata.csv.

Sources: datasets, `Dataset.save_to_disk`, `DatasetDict.save_to_disk` and `DatasetBuilder`; OSCAR,
"OSCAR Schema v1.1"; github.com/google-deepmind/pg19.
"""

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from data_pipeline.errors import DataError, printable
from data_pipeline.system.sources import open_source, scheme_of, shown
from data_pipeline.system.strict_json import parse_json

_MAX_STATE_BYTES = 16 * 2**20
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "metadata.csv", "metadata.tsv"}
_CACHED_RESULT = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")
_HUB_CACHE = re.compile(r"((?:.*/)?)(snapshots|blobs)/.*", re.DOTALL)
_OSCAR_TEXT = re.compile(
    r"(?P<language>(.*/)?[a-z]{2,3})(?P<part>_part_\d+)?\.txt(\.gz)?", re.DOTALL
)
_OSCAR_META = re.compile(
    r"(?P<language>(.*/)?[a-z]{2,3})_meta(?P<part>_part_\d+)?\.jsonl(\.gz)?", re.DOTALL
)


class _Entry(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


E = TypeVar("E", bound=_Entry)


def only_data_files(entries: list[E], ignored: Counter[str]) -> list[E]:
    """`entries` without the files that describe a corpus, caches, locks and unfinished downloads.

    Counts these in `ignored`. Raises DataError for a missing data file.
    """
    folders = {posixpath.dirname(each.name) for each in entries if each.name.endswith(".arrow")}
    by_name = {each.name: each for each in entries}
    copies = _copies_in_hub_caches(by_name)
    dropped: dict[str, str] = {}  # name -> as what it is counted
    for entry in entries:
        folder, name = posixpath.split(entry.name)
        suffix = posixpath.splitext(name)[1]
        if name == "dataset_dict.json" and any(_is_below(each, folder) for each in folders):
            dropped[entry.name] = name
        if name == "state.json" and folder in folders:
            kept = set(_data_files(entry, folder, by_name))
            arrow = (each for each in by_name if posixpath.dirname(each) == folder)
            dropped |= {each: ".arrow" for each in arrow if each.endswith(".arrow")}
            dropped = {each: kind for each, kind in dropped.items() if each not in kept}
            dropped[entry.name] = name
        if name in _DESCRIPTIONS:
            dropped[entry.name] = name
        elif entry.name.startswith(copies):
            dropped[entry.name] = "blobs and refs"
        elif _CACHED_RESULT.fullmatch(name) or (suffix == ".lock" and not entry.size):
            dropped[entry.name] = suffix
        elif ".incomplete" in (posixpath.splitext(part)[1] for part in entry.name.split("/")):
            dropped[entry.name] = ".incomplete"
        elif (meta := _OSCAR_META.fullmatch(entry.name)) and not scheme_of(entry.path):
            text = f"{meta['language']}{meta['part'] or ''}.txt"
            if text in by_name or f"{text}.gz" in by_name:
                dropped[entry.name] = dropped[f"{meta['language']}_sha256.txt"] = "OSCAR metadata"
    ignored.update(kind for name, kind in dropped.items() if name in by_name)
    return [each for each in entries if each.name not in dropped]


def _copies_in_hub_caches(names: Iterable[str]) -> tuple[str, ...]:
    """The beginnings of the names of blobs and refs, which the snapshots have again."""
    parts = {match.groups() for name in names if (match := _HUB_CACHE.fullmatch(name))}
    hubs = {hub for hub, _ in parts if {(hub, "snapshots"), (hub, "blobs")} <= parts}
    return tuple(f"{hub}{part}/" for hub in sorted(hubs) for part in ("blobs", "refs"))


def is_oscar_text(path: str) -> bool:
    """Whether a local file is a text of OSCAR 21.09: its metadata is in the same folder."""
    text = _OSCAR_TEXT.fullmatch(path)
    if not text or scheme_of(path):
        return False
    meta = f"{text['language']}_meta{text['part'] or ''}.jsonl"
    return any(os.path.exists(meta + packed) for packed in ("", ".gz"))  # noqa: PTH110 - faster


def _is_below(path: str, folder: str) -> bool:
    return posixpath.dirname(path) == folder and path != folder


def _data_files(state: _Entry, folder: str, by_name: dict[str, E]) -> Iterator[str]:
    """The names of the data files that state.json lists."""
    try:
        with open_source(state.path, "") as stream:
            content = parse_json(stream.read(_MAX_STATE_BYTES))
        listed = [each["filename"] for each in content["_data_files"]]
    except OSError as error:
        raise DataError(f"{shown(state.path)} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{shown(state.path)} is damaged, so the files of this dataset are not known. Save it "
            "again with save_to_disk, or give its .arrow files by a pattern."
        ) from error
    for filename in listed:
        name = posixpath.join(folder, str(filename))
        if name not in by_name:
            raise DataError(
                f"{shown(state.path)} lists {printable(str(filename))!r}, which is not in its "
                "directory. The copy is incomplete; copy it again."
            )
        yield name
