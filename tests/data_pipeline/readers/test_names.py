"""Folders as corpora are published or cached: which files are read, and as what."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline.readers.split_names import split_of_words, splits_of_names
from tests.data_pipeline.preparation.preparing import texts_of
from tests.data_pipeline.readers.reading import find
from tests.data_pipeline.readers.test_columns import column
from tests.support.corpus_layouts import write_files


def arrow(*texts: str) -> bytes:
    return column(pa.array(texts))


def lines(*contents: object) -> bytes:
    return "".join(json.dumps(content) + "\n" for content in contents).encode()


LAYOUTS: dict[str, tuple[dict[str, bytes], dict[str, str], dict[str, int]]] = {
    "the cache of datasets": (
        {
            "0.0.0/ab/squad-train.arrow": arrow("one", "two"),
            "0.0.0/ab/cache-0123456789abcdef.arrow": arrow("one", "two"),
            "0.0.0/ab/cache-0123456789abcdef_00001_of_00002.arrow": arrow("two"),
            "0.0.0/ab/dataset_info.json": b'{"splits": {}}',
            "0.0.0/ab_builder.lock": b"",
            "0.0.0/cd.incomplete/squad-train.arrow": arrow("half")[:-20],
        },
        {"0.0.0/ab/squad-train.arrow:1": "one", "0.0.0/ab/squad-train.arrow:2": "two"},
        {".arrow": 2, "dataset_info.json": 1, ".lock": 1, ".incomplete": 1},
    ),
    "PG-19": (
        {"books/10.txt": b"one", "books/9.txt": b"two", "metadata.csv": b"10,A title,1850,url\n"},
        {"books/10.txt": "one", "books/9.txt": "two"},
        {"metadata.csv": 1},
    ),
    "WikiExtractor": (
        {
            "AA/wiki_00": lines({"id": "1", "text": "one"}, {"id": "2", "text": "two"}),
            "AB/wiki_00": lines({"id": "3", "text": "three"}),
        },
        {"AA/wiki_00:1": "one", "AA/wiki_00:2": "two", "AB/wiki_00:1": "three"},
        {},
    ),
    "unfinished files and marks of programs": (
        {
            "train/part-0.txt": b"one",
            "train/_SUCCESS": b"",
            "train/_metadata": b"PAR1",
            "train/_temporary/0/part-1": b"half",
            **{f"train/{name}": b"half" for name in ("a.txt.gz.part", "b.csv.crdownload", "c~")},
            **{f"train/{name}": b"half" for name in ("d.tmp", "e.txt.swp", "f.partial")},
            "train/_note.txt": b"two",
            "train/g.parts": b"three",
        },
        {"train/part-0.txt": "one", "train/_note.txt": "two", "train/g.parts": "three"},
        {
            **{".part": 1, ".crdownload": 1, "~": 1, ".tmp": 1, ".swp": 1, ".partial": 1},
            **{"_SUCCESS": 1, "_metadata": 1, "_temporary": 1},
        },
    ),
    "source code": (
        {"poetry.lock": b"locked", "a_meta.jsonl": lines({"text": "kept"}), "b.csv": b"a,b\n"},
        {"poetry.lock": "locked", "a_meta.jsonl:1": "kept", "b.csv": "a,b\n"},
        {},
    ),
}


@pytest.mark.parametrize(("files", "texts", "ignored"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_documents_of_a_layout_are_its_texts(
    txl: Callable[..., Any],
    tmp_path: Path,
    files: dict[str, bytes],
    texts: dict[str, str],
    ignored: dict[str, int],
) -> None:
    folder = write_files(tmp_path / "in", files)
    ended = txl("prepare", folder, "--out", tmp_path / "out", "--json")
    assert ended.code == 0, ended.err
    assert texts_of(tmp_path / "out") == texts
    assert json.loads(ended.out)["ignored"] == ignored


def test_the_cache_of_the_hub_is_read_once(tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "datasets--a--b"
    write_files(hub, {"blobs/0a": lines({"text": "one"}, {"text": "two"}), "refs/main": b"12"})
    parquet.write_table(pa.table({"text": ["three"]}), hub / "blobs" / "0b")
    (hub / "snapshots" / "12").mkdir(parents=True)
    for name, blob in (("a.jsonl", "0a"), ("b.parquet", "0b")):
        (hub / "snapshots" / "12" / name).symlink_to(f"../../blobs/{blob}")
    for folder in (hub, hub.parent, hub.parent.parent):
        found = find(folder)
        assert [file.name.rpartition("/")[2] for file in found.files] == ["a.jsonl", "b.parquet"]
        assert +found.ignored == {"blobs and refs": 3}


SPLIT_WORDS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "validate", "dev", "eval", "evaluation", "heldout"),
    "test": ("test", "testing", "tst", "testset", "newstest", "devtest"),
}
OTHER_WORDS = (
    *("contest", "latest", "evaluated", "devices", "restrain", "protest", "testament", "trainer"),
    *("books", "value", "validity", "household", "holdover", "attested", "strained", "devil"),
)
_separators = st.sampled_from([".", "-", "_", " ", "="])
_numbers = st.sampled_from(["", "1", "2014", "00003"])
_cases = st.sampled_from([str.lower, str.upper, str.capitalize])


@given(st.data())
def test_an_outer_word_gives_a_split_in_any_case_with_numbers_and_any_separator(
    data: st.DataObject,
) -> None:
    split = data.draw(st.sampled_from([*SPLIT_WORDS]))
    word = data.draw(st.sampled_from(SPLIT_WORDS[split]))
    others = data.draw(st.lists(st.sampled_from(OTHER_WORDS), max_size=3))
    if others and data.draw(st.booleans()):  # myTest
        others[-1] += word.capitalize() + data.draw(_numbers)
    else:
        said = data.draw(_cases)(word) + data.draw(_numbers)
        others.insert(data.draw(st.sampled_from([0, len(others)])), said)
    name = data.draw(_separators).join([*others, "txt"])
    assert split_of_words(name, outer=True) == split
    assert split_of_words(name, outer=False) == split


@given(st.lists(st.tuples(st.sampled_from(OTHER_WORDS), _cases, _numbers), min_size=1), _separators)
def test_words_that_only_contain_such_letters_give_no_split(
    words: list[tuple[str, Callable[[str], str], str]], separator: str
) -> None:
    name = separator.join(case(word) + number for word, case, number in words)
    camel = "".join(word.capitalize() + number for word, _, number in words)
    for each in (name, f"{name}.txt", camel):
        assert split_of_words(each, outer=True) == split_of_words(each, outer=False) == ""


@pytest.mark.parametrize(
    "splits",
    [
        # The outermost level on which the names differ.
        {"train/unittest/test/mock": "train", "train/a": "train", "test/a": "test", "dev": "valid"},
        {"c/train/test": "train", "c/test/train": "test", "c/other/dev": "valid", "c": ""},
        # They do not differ on the outermost.
        {"test_data/train": "train", "test_data/a/heldout": "valid", "test_data": "test"},
        {"training/a/test": "test", "training/b": "train"},
        {"heldout/train": "valid", "wiki/train": "train", "wiki/test": "test"},
        {"": "", "a/b": ""},
    ],
    ids=lambda splits: next(iter(splits)),
)
def test_folders_give_splits_on_the_outermost_level_on_which_they_differ(
    splits: dict[str, str],
) -> None:
    names = [f"{folders}/x.txt".lstrip("/") for folders in splits]
    assert splits_of_names(names, [""] * len(names)) == [*splits.values()]
