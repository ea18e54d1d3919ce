"""Which stored tokenizers give ids the same meaning, and what the message says otherwise."""

import hashlib
from pathlib import Path

import pytest

from data_pipeline.tokenizers import ByteTokenizer, Tokenizer
from data_pipeline.tokenizers.char import CharTokenizer
from data_pipeline.tokenizers.comparison import StoredTokenizer, differences
from data_pipeline.tokenizers.ids import IdTokenizer

NAMED = IdTokenizer(7, 2, {0: "Bar", 3: "Pitch_60"})


def stored(folder: Path, tokenizer: Tokenizer, digest: str = "") -> StoredTokenizer:
    content = tokenizer.to_json()
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
    path.write_text(content)
    return StoredTokenizer(path, digest or tokenizer.digest)


def digest_with_names(tokenizer: Tokenizer) -> str:
    """The digest of a vocabulary until version 0.9."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


@pytest.mark.parametrize("names", [{}, {0: "Bar"}, {0: "Pitch_60", 3: "Bar"}], ids=str)
def test_names_of_ids_make_no_difference_also_in_old_digests(
    tmp_path: Path, names: dict[int, str]
) -> None:
    other = IdTokenizer(7, 2, names)
    for first in (stored(tmp_path, NAMED), stored(tmp_path, NAMED, digest_with_names(NAMED))):
        assert differences(first, stored(tmp_path, other)) == ""
        assert differences(first, stored(tmp_path, other, digest_with_names(other))) == ""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (IdTokenizer(8, 7, {}), "vocab_size 7 and 8, end_of_document 2 and 7, the text of id 0 is"),
        (IdTokenizer(7, 1, NAMED.names), "end_of_document 2 and 1, the text of id 1 is '1' and ''"),
        (ByteTokenizer(), "type ids and byte, vocab_size 7 and 257, end_of_document 2 and 256"),
    ],
    ids=["size", "end", "type"],
)
def test_the_differences_are_listed(tmp_path: Path, other: Tokenizer, expected: str) -> None:
    assert differences(stored(tmp_path, NAMED), stored(tmp_path, other)).startswith(expected)


def test_a_difference_in_one_symbol_or_setting_is_named(tmp_path: Path) -> None:
    first = CharTokenizer(["", "a", "b"], opens_documents=True)
    other = CharTokenizer(["", "a", "c"], opens_documents=True)
    assert differences(stored(tmp_path, first), stored(tmp_path, other)) == (
        "the text of id 2 is 'b' and 'c'"
    )
    closed = ByteTokenizer(opens_documents=False)
    assert differences(stored(tmp_path, ByteTokenizer()), stored(tmp_path, closed)) == (
        "settings of the tokenizer"
    )


def test_a_file_of_another_digest_is_not_trusted(tmp_path: Path) -> None:
    wrong = stored(tmp_path, NAMED, "f" * 64)
    missing = StoredTokenizer(tmp_path / "missing.json", "e" * 64)
    for other in (wrong, missing):
        found = differences(stored(tmp_path, NAMED), other)
        assert found == f"digest {NAMED.digest} and {other.digest}"
