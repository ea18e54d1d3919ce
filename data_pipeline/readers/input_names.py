"""The names of input files, which are the ids of their documents: distinct for the whole input."""

import os
import re
from dataclasses import replace
from itertools import takewhile

from data_pipeline.errors import DataError, printable
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.wikitext import name_of_shards, next_shard
from data_pipeline.system.sources import scheme_of, shown


def name_in_utf8(name: str) -> str:
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")


def with_joined_shards(files: list[InputFile]) -> list[InputFile]:
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


def with_distinct_names(files: list[InputFile]) -> list[InputFile]:
    """The files; if several inputs have one of the same name, with longer names for all.

    These are relative to the deepest folder that contains all files.
    """
    if len({file.name for file in files}) == len(files):
        return files
    paths = [_absolute_path(file.path).split("/") for file in files]
    folders = zip(*(parts[:-1] for parts in paths), strict=False)
    num_common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, folders))
    names = ("/".join(parts[num_common:]) for parts in paths)
    return [
        replace(file, name=name_in_utf8(name.partition("?")[0] if scheme_of(file.path) else name))
        for file, name in zip(files, names, strict=True)
    ]


def _absolute_path(path: str) -> str:
    return path if scheme_of(path) else os.path.abspath(path)  # noqa: PTH100


def reject_ambiguous_names(files: list[InputFile]) -> None:
    """Raise DataError if a file would be read twice or two documents would have the same id."""
    by_name: dict[str, InputFile] = {}
    by_path: set[str] = set()
    for file in files:
        for path in map(_absolute_path, (file.path, *file.next_paths)):
            if path in by_path:
                raise DataError(f"{shown(path)} would be read twice. Give every file only once.")
            by_path.add(path)
        if file.name in by_name:
            raise DataError(
                f"{shown(by_name[file.name].path)} and {shown(file.path)} would both be document "
                f"{printable(file.name)!r}. Give a folder that contains both, or rename one."
            )
        by_name[file.name] = file
    for name, file in by_name.items():
        # The id of a document is FILE:line, or FILE if the kind is text.
        other = by_name.get(re.sub(r":[1-9][0-9]*\Z", "", name), file)
        if ":" in name and other is file:  # in a file with keys, it is FILE:KEY
            heads = (name[: match.start()] for match in re.finditer(":", name))
            archives = (by_name[head] for head in heads if head in by_name)
            other = next((each for each in archives if each.has_keys), file)
        if other is not file and other.kind != "text":
            raise DataError(
                f"{shown(file.path)} has the name of a document in {shown(other.path)}, "
                f"{printable(name)!r}. Rename one."
            )
