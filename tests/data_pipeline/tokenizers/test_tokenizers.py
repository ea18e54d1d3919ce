import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import open_tokenizer
from data_pipeline.tokenizers import ByteTokenizer, load_tokenizer, token_dtype


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids


def test_the_end_of_document_decodes_to_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 72, 105, 256]) == "Hi"
    assert tokenizer.token_bytes()[256] == 0


def test_half_a_character_decodes_to_a_replacement_but_its_bytes_are_kept() -> None:
    ids = ByteTokenizer().encode("né")[:-1]
    assert ByteTokenizer().decode(ids) == "n�"
    assert ByteTokenizer().decode_bytes(ids) == b"n\xc3"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="257"):
        ByteTokenizer().decode([65, 257])


def test_a_saved_tokenizer_loads_with_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(ByteTokenizer().to_json())
    assert load_tokenizer(path).digest == ByteTokenizer().digest
    assert load_tokenizer(json.loads(path.read_text())).digest == ByteTokenizer().digest


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"type": "byte"}',
        '{"type": "wordpiece", "version": 1}',
        "[" * 100_000,
    ],
)
def test_a_damaged_or_unknown_tokenizer_is_refused_by_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("changed", [{"vocab_size": 258}, {"extra": 1}, {"version": True}])
def test_a_description_with_anything_changed_is_refused(changed: dict[str, int]) -> None:
    with pytest.raises(DataError):
        load_tokenizer({**json.loads(ByteTokenizer().to_json()), **changed})


def test_the_tokenizer_of_a_dataset_must_have_the_manifests_digest(dataset) -> None:
    directory, manifest = dataset
    other = manifest.model_copy(update={"tokenizer_digest": "0" * 64})
    assert open_tokenizer(directory, manifest).vocab_size == 257
    with pytest.raises(DataError, match="another dataset"):
        open_tokenizer(directory, other)


def test_the_token_type_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert token_dtype(2**16) == np.uint16
    assert token_dtype(2**16 + 1) == np.uint32
