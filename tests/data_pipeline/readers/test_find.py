"""Which files are found, in which order, and the kind of each."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import ConfigError, DataError
from tests.data_pipeline.readers.reading import find, kinds_of, one_file, read, texts
from tests.support.corpus_layouts import write_files

LINES = [f"line {number}" for number in range(50)]
JSONL = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in LINES)
TITLE = b" \n = Title = \n"


def names(*inputs: object, format: str = "auto", out: Path = Path("/nowhere")) -> list[str]:
    return [file.name for file in find(*inputs, format=format, out=out).files]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = ("a.jsonl", "b.txt", "one/c.jsonl", "one/two/d.jsonl.gz", "x.jsonl/e.txt")
    folder = write_files(tmp_path / "tree", dict.fromkeys((*files, ".hidden.jsonl"), b""))
    (folder / "one" / "up").symlink_to(folder)
    return folder


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.jsonl", ["a.jsonl", "one/c.jsonl"]),
        ("**/*.jsonl*", ["a.jsonl", "one/c.jsonl", "one/two/d.jsonl.gz"]),
        ("*.jsonl", ["a.jsonl"]),
        ("*/*.jsonl", ["one/c.jsonl"]),
        ("one/**/*.gz", ["two/d.jsonl.gz"]),
        ("**", ["a.jsonl", "b.txt", "one/c.jsonl", "one/two/d.jsonl.gz", "x.jsonl/e.txt"]),
        ("[ab].*", ["a.jsonl", "b.txt"]),
        ("o?e/[!d]*", ["one/c.jsonl"]),
    ],
)
def test_a_pattern_selects_files_once_through_loops_of_links(
    tree: Path, pattern: str, expected: list[str]
) -> None:
    assert names(tree / pattern) == expected


def test_a_pattern_is_relative_to_here_and_a_file_of_that_name_goes_first(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    assert names("*.txt") == ["b.txt"]
    (tree / "[b].txt").write_text("")
    assert names("[b].txt") == ["[b].txt"]
    with pytest.raises(DataError, match=r"no text matches this.*\*\* matches folders"):
        names("*.nothing")


def test_braces_stand_for_what_a_shell_would_make_of_them(tmp_path: Path) -> None:
    files = ("s-008.txt", "s-009.txt", "s-010.txt", "a/x.txt", "b/y.txt", "{c}.txt", "{1,2}")
    write_files(tmp_path, dict.fromkeys(files, ""))
    assert names(tmp_path / "s-{008..010}.txt") == ["s-008.txt", "s-009.txt", "s-010.txt"]
    assert names(f"file://{tmp_path}/s-0{{10,09}}.txt") == ["s-010.txt", "s-009.txt"]
    assert names(tmp_path / "{a,b}" / "*.txt") == ["x.txt", "y.txt"]
    assert names(tmp_path / "{c}.txt", tmp_path / "{1,2}") == ["{c}.txt", "{1,2}"]
    with pytest.raises(DataError, match=r"s-011\.txt: no such file"):
        names(tmp_path / "s-{008..011}.txt")
    with pytest.raises(DataError, match=r"\{a,b: no such file"):
        names(tmp_path / "{a,b")


def test_an_empty_input_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="an input is empty, perhaps a variable"):
        names("")


def test_files_of_the_same_name_in_several_inputs_have_longer_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ["AA/wiki_00", "AA/wiki_01", "AB/c/wiki_00"]
    write_files(tmp_path / "in", dict.fromkeys(expected, ""))
    inputs = [tmp_path / "in" / name for name in expected]
    assert names(*inputs) == expected
    assert names(tmp_path / "in" / "AA", tmp_path / "in" / "AB" / "c") == expected
    assert names(inputs[0], inputs[1]) == ["wiki_00", "wiki_01"], "as before, if they differ"
    monkeypatch.chdir(tmp_path / "in")
    assert names("AA", "AB/c/*") == expected


def test_two_names_that_are_the_same_in_utf8_are_refused(tmp_path: Path) -> None:
    for name in (b"caf\xe9.txt", rb"caf\xe9.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("")
    with pytest.raises(DataError, match="would both be document"):
        names(tmp_path)


def test_the_output_is_left_out_of_a_pattern_too(tree: Path) -> None:
    assert names(tree / "**/*.jsonl", out=tree / "one") == ["a.jsonl"]


def test_auto_decides_by_suffix_below_compression_and_says_what_it_chose(tmp_path: Path) -> None:
    contents = {
        "a.txt": ("text", b""),
        "b.JSONL": ("jsonl", b""),
        "c.ndjson.zst": ("jsonl", b""),
        "d.parquet": ("parquet", b""),
        "e.md.gz": ("text", gzip.compress(b"")),
        "f.tokens": ("wikitext", TITLE),
        "g.tokens": ("text", b"no title\n" + TITLE),
        "h_wiki.txt.gz": ("wikitext", gzip.compress(TITLE)),
        "i_wiki.zst": ("text", b"damaged"),
        "j.txt": ("text", TITLE),
        "k": ("text", b""),
    }
    write_files(tmp_path, {name: content for name, (_, content) in contents.items()})
    (tmp_path / "l.tar.gz").write_bytes(b"")
    input_files = find(tmp_path)
    assert {file.name: file.kind for file in input_files.files} == {
        name: kind for name, (kind, _) in contents.items()
    }
    assert kinds_of(input_files) == {"text": 6, "jsonl": 2, "parquet": 1, "wikitext": 2}
    assert +input_files.ignored == {".tar.gz": 1}


@pytest.mark.fault_row(22)
@pytest.mark.parametrize("url", ["ftp://host/x", "simplecache::s3://b/k", "hf://datasets/x"])
def test_a_url_of_another_scheme_is_refused_by_name_with_the_legal_ones(url: str) -> None:
    with pytest.raises(ConfigError, match="valid are file, s3, gs, http, https"):
        names(url)


def test_a_file_url_is_the_path(tree: Path) -> None:
    assert names(f"file://{tree}/b.txt") == ["b.txt"]
    assert names(f"file://{tree}/*.txt") == ["b.txt"]
    with pytest.raises(ConfigError, match="absolute path"):
        names("file://b.txt")


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    pytest.importorskip("fsspec")
    try:
        import gcsfs  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'txl-dist\[gcs\]'"):
            names("gs://bucket/key")
    else:
        pytest.skip("gcsfs is installed")


@pytest.mark.fault_row(21)
@pytest.mark.parametrize("name", ["a.rar", "a.7z"])
def test_archives_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match="such archives are not unpacked here"):
        names(tmp_path / name)


def test_a_file_given_twice_is_refused(tree: Path) -> None:
    with pytest.raises(DataError, match=r"c\.jsonl would be read twice"):
        names(tree, tree / "one")
    with pytest.raises(DataError, match=r"b\.txt would be read twice"):
        names(tree / "b.txt", os.path.relpath(tree / "b.txt"))


def test_an_object_replaced_by_one_of_the_same_size_has_another_mark(
    bucket: Any,
) -> None:
    bucket.pipe("bucket/x/a.txt", b"one")
    urls = ("s3://bucket/x/a.txt", "s3://bucket/x")
    before = [one_file(url).mark for url in urls]
    assert before == [one_file(url).mark for url in urls]
    bucket.pipe("bucket/x/a.txt", b"two")
    after = [one_file(url).mark for url in urls]
    assert all(mark and mark != old for mark, old in zip(after, before, strict=True))


def test_keys_patterns_and_failures_of_s3(bucket: Any) -> None:
    bucket.pipe({"bucket/x/a.jsonl": JSONL, "bucket/x/y/b.jsonl": JSONL, "bucket/x/c.txt": b"c"})
    file = one_file("s3://bucket/x/a.jsonl")
    assert (file.name, file.kind, file.size) == ("a.jsonl", "jsonl", len(JSONL))
    assert texts(read(file)) == LINES
    assert names("s3://bucket/x/**/*.jsonl") == ["a.jsonl", "y/b.jsonl"]
    assert names("s3://bucket/x/{c.txt,[ab].jsonl}") == ["c.txt", "a.jsonl"]
    with pytest.raises(DataError, match="s3://bucket/nothing: cannot be read: no such object"):
        one_file("s3://bucket/nothing")
    bucket.rm("bucket/x/a.jsonl")
    (reject,) = read(file)
    assert "cannot be read" in str(reject)
