"""Splits that come with the input: `train=A` on the command line, or the names of its files.

A name gives a split if one of these words is part of it, whatever its case:

    train, training -> train     valid, validation, val, dev, heldout, holdout -> valid
    test, testing -> test

1. A folder in the path of the file whose first or last part is such a word, the innermost first:
   `training-monolingual/news`, `data/validation/00.jsonl`.
2. Otherwise the file's own name without numbers and compression, if the word is its first part, its
   last, or the one before: `validation-00000-of-00001.parquet`, `ptb.train.txt`, `c4-val.json.gz`.
3. With several inputs, the name of the folder that was given: `corpus/train corpus/dev`. It counts
   before the file's own name if the given folders have different splits, otherwise after it.

Parts are separated by `.`, `-`, `_` and blanks. Files of source code (`test_parser.py`) name no
split, and their folders only if one of the folders is named train. A file without a split is in
train. If all files are in one split, nothing was separated, and the names have no effect.
"""

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from data_pipeline.errors import ConfigError, printable
from data_pipeline.readers.formats import InputFile
from data_pipeline.readers.kinds import suffix_of

SPLIT_PATTERN = r"[a-z][a-z0-9_]{0,31}"
TRAIN = "train"
_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev", "heldout", "holdout"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_SOURCE_CODE = {
    *(".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cs", ".java"),
    *(".kt", ".scala", ".go", ".rs", ".swift", ".m", ".js", ".jsx", ".ts", ".tsx", ".vue", ".css"),
    *(".php", ".rb", ".pl", ".lua", ".r", ".jl", ".sh", ".sql", ".hs", ".ml", ".erl", ".el", ".s"),
    *(".lisp", ".asm", ".f90", ".proto", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".md", ".rst"),
}
"""Suffixes of code and its documentation, whose names speak of train and test."""
_MAX_LISTED = 3


def parse_input(argument: str) -> tuple[str, str]:
    """(split, address) of NAME=ADDRESS; the split is "" for an address alone.

    The argument is an address if there is a file with its whole path.
    """
    named = re.fullmatch(rf"({SPLIT_PATTERN})=(.+)", argument, re.DOTALL)
    if not named or os.path.lexists(argument):
        return "", argument
    return named[1], named[2]


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


def with_splits_of_names(inputs: Sequence[Sequence[InputFile]]) -> list[InputFile]:
    """The files of all inputs, each with the split that its name gives; "" if it gives none."""
    files = [file for each in inputs for file in each]
    by_folder = [_split_of_folders(posixpath.dirname(file.name)) for file in files]
    given = [_WORDS.get(_given_folder(file).lower(), "") for file in files]
    if len(inputs) == 1:  # one folder has one split, whatever it is called
        given = [""] * len(files)
    are_given_apart = len({*given} - {""}) > 1
    has_train_folder = TRAIN in by_folder or TRAIN in given
    with_splits = []
    for file, folder, given_folder in zip(files, by_folder, given, strict=True):
        is_code = suffix_of(file.name).name in _SOURCE_CODE
        own = "" if is_code else _split_of_file(posixpath.basename(file.name))
        folders = folder or (given_folder if are_given_apart else "")
        split = (folders if has_train_folder or not is_code else "") or own
        split = split or ("" if is_code else given_folder)
        with_splits.append(replace(file, split=split) if split else file)
    return with_splits


def _split_of_folders(folder: str) -> str:
    splits = (_split_of_parts(parts[:1] + parts[-1:]) for parts in map(_parts, folder.split("/")))
    return next(filter(None, reversed(list(splits))), "")


def _split_of_file(name: str) -> str:
    parts = _parts(name.lower().removesuffix(suffix_of(name).packed))
    return _split_of_parts(parts[:1] + parts[-2:])


def _parts(name: str) -> list[str]:
    """The words of a name, without numbers such as those of `00000-of-00002`."""
    return [part for part in re.split(r"[.\-_\s]+", name.lower()) if not _is_number(part)]


def _is_number(part: str) -> bool:
    return part in ("", "of") or part.isdigit()


def _split_of_parts(parts: Iterable[str]) -> str:
    """The split that these words give; "" for none or for different ones."""
    splits = {_WORDS[part] for part in parts if part in _WORDS}
    return splits.pop() if len(splits) == 1 else ""


def _given_folder(file: InputFile) -> str:
    """The name of the folder in which the file's name begins."""
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
    unnamed = [printable(file.name) for file in files if not file.split]
    note = ""
    if unnamed and len(unnamed) < len(files):
        more = f" and {len(unnamed) - _MAX_LISTED:,} more" if len(unnamed) > _MAX_LISTED else ""
        listed = ", ".join(unnamed[:_MAX_LISTED]) + more
        note = f" (in train because their names give no split: {listed})"
    return "; ".join(counts) + note
