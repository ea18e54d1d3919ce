"""The splits that the names of input files give.

Splits come with `train=A` on the command line, or with words in names (`_WORDS`):

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
"""

import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from data_pipeline.errors import printable
from data_pipeline.readers.source import InputFile, suffix_of

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
_MAX_LISTED = 3


def with_splits_of_names(inputs: Sequence[Sequence[InputFile]]) -> list[InputFile]:
    """The files of all inputs, each with the split that its name gives; "" if it gives none."""
    files = [file for each in inputs for file in each]
    # One folder has one split, whatever it is called.
    given = [_given_folder(file) if len(inputs) > 1 else "" for file in files]
    splits = splits_of_names([file.name for file in files], given)
    pairs = zip(files, splits, strict=True)
    return [replace(file, split=split) if split else file for file, split in pairs]


def _given_folder(file: InputFile) -> str:
    """The name of the folder in which the file's name begins."""
    if file.archive:  # the folder is the archive
        return posixpath.basename(file.archive).partition(".")[0]
    return posixpath.basename(posixpath.dirname(file.path.removesuffix(file.name) + "x"))


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
    is_code = {file.name: file.suffix.name in _SOURCE_CODE for file in files}
    code_has_splits = any(file.split and is_code[file.name] for file in files)
    unnamed = (f for f in files if not f.split and (code_has_splits or not is_code[f.name]))
    return [f for f in unnamed if not _DESCRIBES.fullmatch(posixpath.basename(f.name))]


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
