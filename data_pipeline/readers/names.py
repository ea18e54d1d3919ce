"""The names of input files: braces and wildcards in addresses, and what names say.

They say the splits of files, the ids of their documents, and which files are no data.

**Splits** come with `train=A` on the command line, or with words in names (`_WORDS`):

1. A name gives a split if its first word, its last or the one before says one, numbers and
   compression apart: `training-monolingual`, `validation-00000-of-00001.parquet`, `newstest2014`.
2. A file's path has its folders, and the folder that was given if there are several inputs. Of the
   names in it counts the outermost by which the files differ, else the innermost folder:
   `train/package/test/a.txt` beside `test/b.txt` is in train. A given folder counts first if the
   given folders have different splits, otherwise last.
3. All words of a name count if on its level they separate train from another split:
   `wmt-train-en-de.txt` beside `wmt-test-en-de.txt`.

Files of source code (`test_parser.py`) name no split, and their folders only if they separate train
from another. Files without a split are in train, but refused if other names say train: they may be
held-out text (`unclear_files`). If all files are in one split, the names have no effect.

**Descriptions.** `only_data_files` leaves out what describes a corpus: the JSON files, cached
results of `map` and locks of `datasets` (an .arrow file that state.json does not list is such a
result); unfinished downloads, backups of editors, the marks of Hadoop and Spark (_SUCCESS); in the
cache of `huggingface_hub` the blobs/ and refs/ to which its snapshots/ are links; and metadata.csv
of PG-19.

Sources: datasets, `Dataset.save_to_disk`, `DatasetDict.save_to_disk` and `DatasetBuilder`;
github.com/google-deepmind/pg19.
"""

import fnmatch
import glob
import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path

from braceexpand import braceexpand

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.suffixes import suffix_of
from data_pipeline.readers.wikitext import name_of_shards, next_shard
from data_pipeline.system.sources import local_path, scheme_of, shown
from data_pipeline.system.strict_json import parse_json

SPLIT_PATTERN = r"[a-z][a-z0-9_]{0,31}"
TRAIN = "train"
_TOKEN = re.compile(r"h[eo]ld[\W_]?out(?![^\W_])|[^\W_]+", re.IGNORECASE)
_NUMBER = re.compile(r"\d*(of)?\d*")
_CASE_OR_DIGIT = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=\d)(?=[^\W\d_])")
_WORDS = (
    r"(?i:(?P<train>train(?:ing)?)|(?P<test>test(?:ing)?|tst)"
    r"|(?P<valid>val(?:id(?:at(?:e|ion))?)?|dev|eval(?:uation)?|h[eo]ld[\W_]?out))"
)
_HAS_WORD = re.compile(_WORDS)
_IS_WORD = re.compile(
    rf"(?:[A-Za-z][a-z]+(?=[A-Z]))?(?i:news|dev)?{_WORDS}(?i:set)?\d*(?:(?<=[a-z\d])[A-Z])?"
)
_SOURCE_CODE = {
    *(".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cs", ".java"),
    *(".kt", ".scala", ".go", ".rs", ".swift", ".m", ".js", ".jsx", ".ts", ".tsx", ".vue", ".css"),
    *(".php", ".rb", ".pl", ".lua", ".r", ".jl", ".sh", ".sql", ".hs", ".ml", ".erl", ".el", ".s"),
    *(".lisp", ".asm", ".f90", ".proto", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".md", ".rst"),
}
"""Suffixes of code and its documentation, whose names speak of train and test."""
_DESCRIBES = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog|authors)\b.*", re.I)
_MAX_EXPANDED = 100_000
"""Maximum number of addresses of one brace pattern."""
_MAX_LISTED = 3
_MAX_STATE_BYTES = 16 * 2**20
_NO_DATA = re.compile(
    r"(?P<kind>(?:^|(?<=/))(?:dataset_(?:infos?|dict)\.json|metadata\.[ct]sv|_SUCCESS|_temporary"
    r"|_(?:common_)?metadata)|\.(?:incomplete|part|partial|crdownload|tmp|swp)|~)(?:/|$)"
)
"""Also a folder: `0.0.0.incomplete/a.arrow`, `_temporary/0/part-0`."""
_CACHED_RESULT = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")
_HUB_CACHE = re.compile(r"((?:.*/)?)(snapshots|blobs)/.*", re.DOTALL)


def parse_input(argument: str) -> tuple[str, str]:
    """(split, address) of NAME=ADDRESS; the split is "" for an address alone.

    The argument is an address if there is a file with its whole path, or if NAME is part of a path,
    URL or pattern. Raises ConfigError if NAME cannot be the name of a split.
    """
    name, _, address = argument.partition("=")
    if not address or re.search(r"[/:*?\[{]", name) or os.path.lexists(argument):
        return "", argument
    if not re.fullmatch(SPLIT_PATTERN, name):
        raise ConfigError(
            f"{printable(argument)}: {printable(name)!r} cannot be the name of a split: lower-case "
            "letters, digits and _ after a letter, at most 32. Write valid="
            f"{printable(address)}; or, if = is part of a file's name, ./{printable(argument)}"
        )
    return name, address


def require_all_named(splits: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise ConfigError if only some inputs are NAME=ADDRESS, or if none is named train."""
    if not any(splits):
        return
    if "" in splits:
        unnamed = printable(arguments[list(splits).index("")])
        raise ConfigError(
            f"{unnamed}: this input has no split and others have one. Name the split of every "
            f"input: train={unnamed}"
        )
    if TRAIN not in splits:
        raise ConfigError(
            f"the inputs are {', '.join(sorted(set(splits)))}, and none is train. Give the text to "
            "train on as train=PATH"
        )


def expand_braces(address: str) -> list[str]:
    """The addresses of shard-{000..127}.tar or {a,b}/*.txt, in the order in which a shell expands.

    A file of this name, and braces that a shell would not expand, stay as they are.
    """
    if not address:
        raise ConfigError(
            "an input is empty, perhaps a variable of the shell that is not set. Give a file, "
            "folder, pattern or URL; . is the current folder."
        )
    local = local_path(address)
    if "{" not in address or (local and Path(local).exists()):
        return [address]
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", address)
    expanded = []
    try:
        size = math.prod(abs(int(stop) - int(start)) + 1 for start, stop in ranges)
        if size <= _MAX_EXPANDED:  # braceexpand holds every range in RAM
            expanded = list(islice(braceexpand(address, escape=False), _MAX_EXPANDED + 1))
    except ValueError:  # the braces are not balanced
        return [address]
    if not 0 < len(expanded) <= _MAX_EXPANDED:
        raise ConfigError(
            f"{shown(address)}: the braces expand to more than {_MAX_EXPANDED:,} inputs. Give the "
            "folder, or a pattern with * that matches the files that exist."
        )
    return expanded


def is_pattern(address: str) -> bool:
    return glob.has_magic(address.partition("://")[2] or address)


def split_pattern(address: str) -> tuple[str, re.Pattern[str]]:
    """The folder before the first wildcard, and a regular expression for names relative to it."""
    parts = address.split("/")
    num_fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    regexes = []
    for part in parts[num_fixed:]:
        # `**` matches any number of folders, `*` no slash. Names have no empty parts.
        translated = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
        regexes.append("(?:[^/]+/)*" if part == "**" else translated.replace(".*", "[^/]*") + "/")
    if parts[-1] == "**":
        regexes.append("[^/]+/")
    root = "/".join(parts[:num_fixed]) or ("/" if address.startswith("/") else ".")
    return root, re.compile("".join(regexes).removesuffix("/"), re.DOTALL)


# --- splits -----------------------------------------------------------------------------------


def with_splits_of_names(inputs: Sequence[Sequence[InputFile]]) -> list[InputFile]:
    """The files of all inputs, each with the split that its name gives; "" if it gives none."""
    files = [file for each in inputs for file in each]
    # One folder has one split, whatever it is called.
    given = [_given_folder(file) if len(inputs) > 1 else "" for file in files]
    splits = splits_of_names([file.name for file in files], given)
    pairs = zip(files, splits, strict=True)
    return [replace(file, split=split) if split else file for file, split in pairs]


def splits_of_names(names: Sequence[str], given: Sequence[str]) -> list[str]:
    """The split of each file by its path, and by the name of the folder that was given.

    It is "" if they give none. A level has the names at one depth: the given folder, the folders
    below it, the files themselves.
    """
    depth = max((name.count("/") for name in names), default=0)
    suffixes = [suffix_of(name) for name in names]
    is_code = [suffix.name in _SOURCE_CODE for suffix in suffixes]
    paths = []
    for name, root, suffix, code in zip(names, given, suffixes, is_code, strict=True):
        *folders, own = name.split("/")
        own = "" if code else own[: len(own) - len(suffix.packed)]
        paths.append((root, *folders, *[""] * (depth - len(folders)), own))
    columns = list(zip(*paths, strict=True))
    levels, by_all_words = (
        [[split_of_words(name, outer=outer) for name in column] for column in columns]
        for outer in (True, False)
    )
    order = [level for level in levels[:1] if len({*level} - {""}) > 1]
    order += [level for level in levels[1:] if len({*level}) > 1]
    order += filter(_separates_train, by_all_words)
    order += [*levels[-2:0:-1], *levels[-1:], *levels[:1]]
    splits = [next(filter(None, row), "") for row in zip(*order, strict=True)]
    if any(map(_separates_train, levels[:-1])):  # folders, which count for source code, too
        return splits
    return ["" if code else split for code, split in zip(is_code, splits, strict=True)]


def _separates_train(splits: Iterable[str]) -> bool:
    return {TRAIN} < {*splits} - {""}


@lru_cache(maxsize=2**14)
def split_of_words(name: str, *, outer: bool) -> str:
    """The split that the outer words of a name give, or all; "" for none, or train and another."""
    if not _HAS_WORD.search(name):  # most names
        return ""
    words = _TOKEN.findall(name if outer else _CASE_OR_DIGIT.sub("_", name))
    words = [word for word in words if not _NUMBER.fullmatch(word)]
    matches = filter(None, map(_IS_WORD.fullmatch, words[:1] + words[-2:] if outer else words))
    pairs = [(str(match.lastgroup), match[str(match.lastgroup)]) for match in matches]
    # Words in other cases are parts of random ids, such as `xyTsT`.
    splits = [split for split, word in pairs if word in (word.lower(), word.upper(), word.title())]
    return "" if not splits or {TRAIN} < {*splits} else splits[-1]


def unclear_files(files: Sequence[InputFile]) -> list[InputFile]:
    """Files whose names give no split where others say train: they may be held-out text.

    Not those that describe a corpus; source code only if folders of source code give splits.
    """
    if all(file.split != TRAIN for file in files):
        return []
    is_code = {file.name: suffix_of(file.name).name in _SOURCE_CODE for file in files}
    code_has_splits = any(file.split and is_code[file.name] for file in files)
    unnamed = (f for f in files if not f.split and (code_has_splits or not is_code[f.name]))
    return [f for f in unnamed if not _DESCRIBES.fullmatch(posixpath.basename(f.name))]


def _given_folder(file: InputFile) -> str:
    """The name of the folder in which the file's name begins."""
    if file.archive:  # the folder is the archive
        return posixpath.basename(file.archive).partition(".")[0]
    return posixpath.basename(posixpath.dirname(file.path.removesuffix(file.name) + "x"))


def split_order(split: str) -> tuple[bool, bool, bool, str]:
    """Sorts splits: train, valid, others, test."""
    return split != TRAIN, split == "test", split != "valid", split


def count_by_split(files: Iterable[InputFile]) -> dict[str, int]:
    """Number of files by split, in that order. A file without a split is in train."""
    counts: Counter[str] = Counter()
    for file in files:
        counts[file.split or TRAIN] += 1 + len(file.next_paths)
    return {split: counts[split] for split in sorted(counts, key=split_order)}


def list_splits(files: Sequence[InputFile]) -> str:
    """The number of files of every split as text: "3 files: train; 1: valid; 1: test"."""
    counts = [f"{count:,}: {split}" for split, count in count_by_split(files).items()]
    counts[0] = counts[0].replace(":", " file:" if counts[0].startswith("1:") else " files:")
    unnamed = [file.name for file in files if not file.split]
    note = f" (in train because their names give no split: {list_names(unnamed)})"
    return "; ".join(counts) + note * (0 < len(unnamed) < len(files))


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _MAX_LISTED:,} more" * (len(names) > _MAX_LISTED)
    return ", ".join(map(printable, names[:_MAX_LISTED])) + more


# --- names of documents ----------------------------------------------------------------------


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
    paths = [_absolute_path(file.place).split("/") for file in files]
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
    """Raise DataError if a file would be read twice or two files would have the same name."""
    by_name: dict[str, InputFile] = {}
    by_path: set[str] = set()
    for file in files:
        for path in map(_absolute_path, (file.place, *file.next_paths)):
            if path in by_path:
                raise DataError(f"{shown(path)} would be read twice. Give every file only once.")
            by_path.add(path)
        if file.name in by_name:
            raise DataError(
                f"{shown(by_name[file.name].place)} and {shown(file.place)} would both be document "
                f"{printable(file.name)!r}. Give a folder that contains both, or rename one."
            )
        by_name[file.name] = file


# --- files that are no data ------------------------------------------------------------------


def only_data_files(files: list[InputFile], ignored: Counter[str]) -> list[InputFile]:
    """`files` without those that describe a corpus, caches, locks, backups, unfinished downloads.

    Counts these in `ignored`. Raises DataError for a missing data file of a saved dataset.
    """
    names = {file.name for file in files}
    arrow_folders = {posixpath.dirname(name) for name in names if name.endswith(".arrow")}
    listed: dict[str, set[str]] = {}  # the data files of every folder of a saved dataset
    for file in files:
        folder, name = posixpath.split(file.name)
        if name == "state.json" and folder in arrow_folders:
            listed[folder] = _listed_files(file, folder, names)
    copies = _copies_in_hub_caches(names)
    data_files = []
    for file in files:
        if kind := _kind_of_description(file, listed, copies):
            ignored[kind] += 1
        else:
            data_files.append(file)
    return data_files


def _kind_of_description(
    file: InputFile, listed: dict[str, set[str]], copies: tuple[str, ...]
) -> str:
    """As what a file that is no data is counted; "" for data."""
    folder, name = posixpath.split(file.name)
    suffix = posixpath.splitext(name)[1]
    if no_data := _NO_DATA.search(file.name):
        return no_data["kind"]
    if name == "state.json" and folder in listed:
        return name
    if file.name.startswith(copies):
        return "blobs and refs"
    is_lock = suffix == ".lock" and not file.size
    is_cached = suffix == ".arrow" and file.name not in listed.get(folder, {file.name})
    return suffix if is_lock or is_cached or _CACHED_RESULT.fullmatch(name) else ""


def _copies_in_hub_caches(names: Iterable[str]) -> tuple[str, ...]:
    """The beginnings of the names of blobs and refs, which the snapshots have again."""
    parts = {match.groups() for name in names if (match := _HUB_CACHE.fullmatch(name))}
    hubs = {hub for hub, _ in parts if {(hub, "snapshots"), (hub, "blobs")} <= parts}
    return tuple(f"{hub}{part}/" for hub in sorted(hubs) for part in ("blobs", "refs"))


def _listed_files(state: InputFile, folder: str, names: set[str]) -> set[str]:
    """The names of the data files that state.json lists."""
    try:
        with state.open() as stream:
            content = parse_json(stream.read(_MAX_STATE_BYTES))
        listed = [posixpath.join(folder, str(each["filename"])) for each in content["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{shown(state.path)} cannot be read ({printable(str(error))[:80]}), so the files of "
            "this dataset are not known. Save it again with save_to_disk, or give its .arrow files "
            "by a pattern."
        ) from error
    if missing := sorted({*listed} - names):
        raise DataError(
            f"{shown(state.path)} lists {printable(missing[0])!r}, which is not in its directory. "
            "The copy is incomplete; copy it again."
        )
    return {*listed}
