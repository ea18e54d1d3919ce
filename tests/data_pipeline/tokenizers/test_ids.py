"""Token ids as text, with and without names."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.tokenizers.ids import IdTokenizer, read_names
from data_pipeline.tokenizers.interface import text_parts
from data_pipeline.tokenizers.loading import load_tokenizer

NAMES = {1: "Bar_None", 3: "Pitch_60", 6: "Ä"}
PLAIN, NAMED = IdTokenizer(7, 2, {}), IdTokenizer(7, 2, NAMES)
IDS = st.lists(st.sampled_from([0, 1, 3, 4, 5, 6]))


@pytest.mark.parametrize("tokenizer", [PLAIN, NAMED], ids=["plain", "named"])
@given(ids=IDS)
def test_text_of_ids_is_encoded_to_the_same_ids(tokenizer: IdTokenizer, ids: list[int]) -> None:
    for text in (tokenizer.decode(ids), " ".join(map(str, ids))):
        encoded = tokenizer.encode(text)
        assert encoded.tolist() == ids
        assert encoded.dtype == np.uint16
        parts = text_parts([text], max_chars=12, cuts=tokenizer.cuts)
        assert [id_ for part in parts for id_ in tokenizer.encode(part)] == ids
    assert tokenizer.decode([2, *ids, 2]) == tokenizer.decode(ids)


def test_names_are_shown_and_understood() -> None:
    assert NAMED.decode([3, 4, 1]) == "Pitch_60 4 Bar_None"
    assert NAMED.encode(" Pitch_60\n4 1").tolist() == [3, 4, 1]
    assert PLAIN.decode([3, 4, 1]) == "3 4 1"


@pytest.mark.parametrize("text", ["", " ", "  \n"])
def test_a_text_without_ids_has_none(text: str) -> None:
    for tokenizer in (PLAIN, NAMED):
        assert tokenizer.encode(text).tolist() == []


@pytest.mark.parametrize(
    "text", ["7", "3 99999999999", "9" * 40, "-1", "Pitch_61", "3.0", "٣", "2"]
)
def test_a_prompt_that_is_not_of_ids_is_refused_by_name(text: str) -> None:
    for tokenizer in (PLAIN, NAMED):
        with pytest.raises(ConfigError, match="token id"):
            tokenizer.encode(text)


def test_it_is_loaded_as_saved() -> None:
    for tokenizer in (PLAIN, NAMED):
        loaded = load_tokenizer(json.loads(tokenizer.to_json()))
        assert isinstance(loaded, IdTokenizer)
        assert (loaded.digest, loaded.names) == (tokenizer.digest, tokenizer.names)
        assert loaded.token_bytes().tolist() == [0] * 7
    assert PLAIN.digest == NAMED.digest, "names are no part of a vocabulary's identity"
    assert len({each.digest for each in (PLAIN, IdTokenizer(7, 3, {}), IdTokenizer(8, 2, {}))}) == 3


@pytest.mark.parametrize(
    "content",
    [
        ["", "a", "", "b"],
        {"1": "a", "3": "b"},
        {"a": 1, "b": 3},
        json.loads(IdTokenizer(7, 2, {1: "a", 3: "b"}).to_json()),
    ],
    ids=str,
)
def test_names_come_from_four_layouts(tmp_path: Path, content: object) -> None:
    (tmp_path / "names.json").write_text(json.dumps(content))
    assert read_names(tmp_path / "names.json") == {1: "a", 3: "b"}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "Expecting value"),
        ("7", "no names of token ids"),
        ('["a", 2]', "no names of token ids"),
        ('{"one": "a"}', "no names of token ids"),
        ('{"a": 1, "b": 1}', "an id has two names"),
        ('{"1": "a", "01": "b"}', "an id has two names"),
        ('{"a": 1, "a": 2}', "twice in one object"),
        ('{"1": "a", "2": 3}', "no names of token ids"),
        ('{"miditok_version": "3"}', "no names of token ids"),
        ("[" * 100_000, "no names of token ids"),
    ],
)
def test_a_bad_file_of_names_is_refused(tmp_path: Path, content: str, cause: str) -> None:
    (tmp_path / "names.json").write_text(content)
    with pytest.raises(DataError, match=cause):
        read_names(tmp_path / "names.json")


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        ({7: "a"}, "the vocabulary has 7 ids"),
        ({1: "a b"}, "'a b' of id 1 has whitespace"),
        ({1: "60"}, "'60' of id 1 .* is a number"),
        ({1: "a", 2: "a"}, "two ids have the same name"),
    ],
)
def test_names_that_cannot_be_read_back_are_refused(names: dict[int, str], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        IdTokenizer(7, 2, names)
