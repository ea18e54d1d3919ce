"""Token ids as text, with and without names."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.tokenizers.ids import IdTokenizer, read_names, require_usable_names
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


def midi_tokenizer(tmp_path: Path, model: dict[str, object], **others: object) -> Path:
    """A tokenizer as MidiTok 3 saves it: the model has one character per base token."""
    library = {"pre_tokenizer": None, "model": model, **others}
    content = {
        "tokenization": "REMI",
        "miditok_version": "3.1.0",
        "_vocab_base": {"PAD_None": 0, "Bar_None": 1, "Pitch_60": 2},
        "_vocab_base_byte_to_token": {"!": "PAD_None", "#": "Bar_None", "\x85": "Pitch_60"},
        "_model": json.dumps(library),
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tmp_path / "tokenizer.json"


def test_a_trained_tokenizer_of_miditok_has_the_names_of_its_base_and_learned_tokens(
    tmp_path: Path,
) -> None:
    base = {"!": 0, "#": 1, "\x85": 2}
    names = {0: "PAD_None", 1: "Bar_None", 2: "Pitch_60"}
    bpe = {"type": "BPE", "vocab": {**base, "#\x85": 3}}
    assert read_names(midi_tokenizer(tmp_path, bpe)) == {**names, 3: "Bar_None+Pitch_60"}
    word_piece = {"vocab": {**base, "###": 3}, "continuing_subword_prefix": "##"}
    assert read_names(midi_tokenizer(tmp_path, word_piece)) == {**names, 3: "Bar_None#3"}
    unigram = {"vocab": [["#\x85", -1.5], ["▁#", -2.0], ["#", -2.5]]}
    by_bar = {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}
    found = read_names(midi_tokenizer(tmp_path, unigram, **by_bar))
    assert found == {0: "Bar_None+Pitch_60", 1: "Bar_None", 2: "Bar_None#2"}
    require_usable_names(found, 3)


def test_a_tokenizer_of_miditok_without_a_vocabulary_says_how_to_write_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"config": {}, "tokenization": "REMI", "miditok_version": "3"}'
    )
    with pytest.raises(DataError, match=r"json.dump\(tokenizer.vocab, open\('names.json', 'w'\)\)"):
        read_names(tmp_path / "a.json")
    with pytest.raises(DataError, match="its MidiTok model has another layout"):
        read_names(midi_tokenizer(tmp_path, {"vocab": {"x": 0}}))


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "Expecting value"),
        ("7", "it is int, not an array or an object"),
        ('["a", 2]', "the name of id 1 is int"),
        ('{"one": "a"}', "the key 'one' is not a token id"),
        ('{"01": "a"}', "the key '01' is not a token id"),
        ('{"a": 1, "b": 1}', "id 1 has the names 'a' and 'b'"),
        ('{"a": 1, "a": 2}', "twice in one object"),
        ('{"1": "a", "2": 3}', "the name of id 2 is int"),
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
        ({1: "a b"}, "has whitespace"),
        ({1: "60"}, "is a number"),
        ({1: "a", 2: "a"}, "is the name of id 1 and of id 2"),
    ],
)
def test_names_that_cannot_be_read_back_are_refused(names: dict[int, str], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        IdTokenizer(7, 2, names)
