"""Articles of WikiText, from its files and from the rows that Hugging Face publishes."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from data_pipeline.readers import InputFile, Reject
from tests.data_pipeline.readers.reading import find, one_file, read, texts
from tests.data_pipeline.readers.test_columns import FILES

WIKI = (
    " \n = First = \n \n words of it \n = = A section = = \n more \n"
    " = E = M C 2 ( album ) = \r\n café \n = = = Deeper = = = \n = not a title \n"
)


def test_articles_of_wikitext_begin_at_titles_and_not_at_sections(tmp_path: Path) -> None:
    path = tmp_path / "wiki.train.tokens"
    path.write_bytes(WIKI.encode())
    file = one_file(path)
    assert file.kind == "wikitext"
    records = read(file)
    start = WIKI.index(" = E =")
    assert texts(records) == [WIKI[:start], WIKI[start:]], "no line is lost"
    assert [record.line for record in records] == [1, 7]


@pytest.mark.parametrize("front", ["", " \n\n", "\ufeff"])
def test_text_before_the_first_title_is_a_document_unless_blank(tmp_path: Path, front: str) -> None:
    path, blank = tmp_path / "in.txt", front.removeprefix("\ufeff")
    path.write_text(front + "some words \n more \n" + " = Title = \n x \n", newline="")
    assert texts(read(one_file(path, "wikitext"))) == [
        blank + "some words \n more \n",
        " = Title = \n x \n",
    ]
    path.write_text(front + " = Title = \n x \n", newline="")
    assert texts(read(one_file(path, "wikitext"))) == [blank + " = Title = \n x \n"]


LINES = [f" line {number} of it , café \n" for number in range(9)]
ARTICLES = (
    " \n = First = \n \n"
    + "".join(LINES)
    + " = = A section = = \n \n words \n \n \n"
    + " = Second = \n \n"
    + "".join(LINES[:4])
    + " \n = Third = \n \n more \n \n"
)


def rows_of(text: str) -> list[str]:
    """The rows of Hugging Face: lines with their ends, and "" for a blank line."""
    return [line if line.strip() else "" for line in text.splitlines(keepends=True)]


def write_shards(folder: Path, split: str, text: str, *, shards: int, suffix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(text)
    size = -(-len(rows) // shards)
    for number in range(shards):
        table = pa.table({"text": rows[number * size : (number + 1) * size]})
        path = folder / f"{split}-{number:05}-of-{shards:05}{suffix}"
        path.write_bytes(FILES[f"in{suffix}"](table))


def found_in(folder: Path, *, is_wikitext: bool = True, text_key: str = "text") -> list[InputFile]:
    return find(folder, is_wikitext=is_wikitext, text_key=text_key).files


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_rows_are_read_as_the_file_they_were_made_of(
    tmp_path: Path, shards: int, suffix: str
) -> None:
    (tmp_path / "wiki.train.tokens").write_text(ARTICLES, newline="")
    expected = read(one_file(tmp_path / "wiki.train.tokens"))
    assert len(expected) == 3
    write_shards(tmp_path / "hf", "train", ARTICLES, shards=shards, suffix=suffix)
    found = find(tmp_path / "hf", is_wikitext=True)
    assert found.read_as == {"wikitext_rows": {suffix: shards}}
    (file,) = found.files
    assert file.name == (f"train{suffix}" if shards > 1 else f"train-00000-of-00001{suffix}")
    records = read(file)
    assert texts(records) == texts(expected)
    assert [record.line for record in records] == [record.line for record in expected]


def test_rows_are_recognised_by_the_path_or_the_recipe_and_their_content(tmp_path: Path) -> None:
    for folder in ("wikitext-2-raw-v1", "plain"):
        write_shards(tmp_path / folder, "test", ARTICLES, shards=1, suffix=".parquet")
    kinds = [
        found_in(tmp_path / folder, is_wikitext=recipe)[0].kind
        for folder in ("wikitext-2-raw-v1", "plain")
        for recipe in (False, True)
    ]
    assert kinds == ["wikitext_rows", "wikitext_rows", "parquet", "wikitext_rows"]
    articles = texts(read(found_in(tmp_path / "plain")[0]))
    parquet.write_table(pa.table({"text": articles}), tmp_path / "plain" / "articles.parquet")
    documents, rows = found_in(tmp_path / "plain")
    assert (documents.kind, rows.kind) == ("parquet", "wikitext_rows")
    assert texts(read(documents)) == articles, "one article per row"
    for file in found_in(tmp_path / "plain", text_key="missing"):
        assert file.kind == "parquet", "whose reader names the column"


def test_splits_and_shards_with_a_gap_are_not_joined(tmp_path: Path) -> None:
    for split in ("test", "train"):
        write_shards(tmp_path, split, ARTICLES * 2, shards=4, suffix=".parquet")
    (tmp_path / "train-00002-of-00004.parquet").unlink()
    names = [file.name for file in found_in(tmp_path)]
    assert names == ["test.parquet", "train.parquet", "train-00003-of-00004.parquet"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [(None, '"text" is null'), (" = A = \n b \n", "not one line"), ("x", "not one line")],
)
def test_a_row_that_is_missing_or_damaged_makes_no_article_with_a_gap(
    tmp_path: Path, row: str | None, reason: str
) -> None:
    write_shards(tmp_path, "train", ARTICLES * 400, shards=2, suffix=".parquet")
    path = tmp_path / "train-00001-of-00002.parquet"
    rows = [*rows_of(ARTICLES * 400)[:5000], row]
    parquet.write_table(pa.table({"text": rows}), path)
    *good, reject = read(found_in(tmp_path)[0])
    assert isinstance(reject, Reject)
    assert "00001-of-00002.parquet: row 5001: " in reject.reason
    assert reason in reject.reason
    assert reject.loses_rest
    (tmp_path / "all").write_text(ARTICLES * 800)
    expected = texts(read(one_file(tmp_path / "all", "wikitext")))
    assert texts(good) == expected[: len(good)]
