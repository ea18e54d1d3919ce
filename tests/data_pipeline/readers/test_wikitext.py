from pathlib import Path

import pytest

from tests.data_pipeline.readers.reading import one_file, read, texts

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
