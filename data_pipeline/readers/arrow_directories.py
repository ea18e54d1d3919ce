"""Directories of `datasets.save_to_disk`: which of their files are the dataset.

    state.json                    names the data files
    dataset_info.json             a description
    data-00000-of-00002.arrow     the data
    cache-0123456789abcdef.arrow  results of `map` on the loaded dataset, which are not part of it
    dataset_dict.json             a DatasetDict: every split is a directory

Source: datasets, `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.
"""

import posixpath
from collections import Counter
from collections.abc import Iterator
from typing import Protocol, TypeVar

from data_pipeline.errors import DataError, printable
from data_pipeline.storage import strict_json
from data_pipeline.storage.open_source import open_source
from data_pipeline.storage.urls import shown

_MAX_STATE_BYTES = 16 * 2**20


class _Entry(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=_Entry)


def only_data_files(entries: list[E], ignored: Counter[str]) -> list[E]:
    """`entries` without the files that describe a saved dataset and without its caches.

    Counts these in `ignored`. Raises DataError for a missing data file.
    """
    folders = {posixpath.dirname(each.name) for each in entries if each.name.endswith(".arrow")}
    by_name = {each.name: each for each in entries}
    dropped: set[str] = set()
    for entry in entries:
        folder, name = posixpath.split(entry.name)
        if name == "dataset_dict.json" and any(_is_below(each, folder) for each in folders):
            dropped.add(entry.name)
        if name == "state.json" and folder in folders:
            kept = set(_data_files(entry, folder, by_name))
            arrow = (each for each in by_name if posixpath.dirname(each) == folder)
            dropped |= {each for each in arrow if each.endswith(".arrow")} - kept
            dropped |= {entry.name, posixpath.join(folder, "dataset_info.json")}
    ignored.update(posixpath.splitext(name)[1] for name in dropped & by_name.keys())
    return [each for each in entries if each.name not in dropped]


def _is_below(path: str, folder: str) -> bool:
    return posixpath.dirname(path) == folder and path != folder


def _data_files(state: _Entry, folder: str, by_name: dict[str, E]) -> Iterator[str]:
    """The names of the data files that state.json lists."""
    try:
        with open_source(state.path, "") as stream:
            content = strict_json.parse(stream.read(_MAX_STATE_BYTES))
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
