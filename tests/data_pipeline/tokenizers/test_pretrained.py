"""Tokenizers from files of the `tokenizers` library, and the text and bytes of their tokens."""

import functools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.errors import DataError
from data_pipeline.tokenizers import load_tokenizer, ready_tokenizer
from data_pipeline.tokenizers.pretrained import (
    HARD_STRINGS,
    PretrainedDescription,
    PretrainedTokenizer,
    from_library_json,
    library_json,
    require_same_ids,
)
from tests.data_pipeline.tokenizers.sample_tokenizers import (
    FILE,
    SAMPLE,
    TOKENIZER,
    byte_level,
    with_unknown_as_only_special,
)
from tests.support.hypothesis_examples import examples
from tests.support.tokenizer_families import (
    EUROPEAN,
    IN_BYTES,
    JAPANESE,
    LIBRARY_OF,
    tokenizer_of_family,
)
from txl_dist.generation.text import TextDecoder, TextLimits, stream_text


def saved(tmp_path: Path, library: tokenizers.Tokenizer) -> Path:
    path = tmp_path / "library.json"
    library.save(str(path))
    return path


def test_a_file_of_byte_level_bpe_keeps_its_end_of_text_which_texts_cannot_write(
    tmp_path: Path,
) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SAMPLE, trainer)
    tokenizer = ready_tokenizer(FILE, saved(tmp_path, library))
    text = "a <|endoftext|> b"
    assert 0 in library.encode(text).ids, "the library makes it the real token"
    assert tokenizer.end_of_document == 0
    assert tokenizer.vocab_size == 400
    assert 0 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.cuts == "space"
    for sample in SAMPLE[:1] + list(HARD_STRINGS[:6]):
        assert tokenizer.encode(sample).tolist() == library.encode(sample).ids
    assert load_tokenizer(json.loads(tokenizer.to_json())).digest == tokenizer.digest


def test_another_kind_of_tokenizer_goes_through_the_library(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[UNK]", "[CLS]"])
    tokenizer = ready_tokenizer(FILE, saved(tmp_path, library))
    assert tokenizer.encode("the cat [CLS] the").tolist() == [1, 2, 0, 1]
    assert tokenizer.end_of_document == 3, "two special tokens: the end is a new id"
    assert tokenizer.vocab_size == 4
    assert tokenizer.cuts == "never"
    assert not tokenizer.token_bytes().any(), "any word may be unknown"
    assert tokenizer.decode([1, 2, 3, 2]) == "the catcat"
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        tokenizer.encode("the \ud800")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_token_for_what_is_unknown_never_ends_a_document(tmp_path: Path, kind: str) -> None:
    tokenizer = ready_tokenizer(FILE, saved(tmp_path, with_unknown_as_only_special(kind)))
    ids = tokenizer.encode("the cat 漢 sat")
    assert 0 in ids, "the unknown token"
    assert tokenizer.end_of_document == tokenizer.vocab_size - 1
    assert tokenizer.end_of_document not in ids


def test_tokens_after_special_ones_keep_their_ids_and_no_text_is_special() -> None:
    """As in Qwen 2.5, where `<tool_call>` follows `<|im_start|>`."""
    library = LIBRARY_OF["qwen2.5"]()
    tokenizer = from_library_json(json.loads(library.to_str()), "x.json")
    special = {"<|endoftext|>": 330, "<|im_start|>": 331, "<|fim_pad|>": 334}
    assert {token: library.token_to_id(token) for token in special} == special
    text = "<think>the grey sea<tool_call> é。x"
    ids = tokenizer.encode(text).tolist()
    assert ids == library.encode(text).ids
    assert {332, 333, 335} <= {*ids}
    for token, id_ in special.items():
        written = tokenizer.encode(f"{token} x{token}<think>")
        assert not {*written.tolist()} & {*special.values()}
        assert tokenizer.decode(written) == f"{token} x{token}<think>"
        assert tokenizer.decode([id_]) == token
    assert tokenizer.end_of_document == 336
    assert load_tokenizer(json.loads(tokenizer.to_json())).encode(text).tolist() == ids


def test_special_tokens_that_a_text_would_encode_to_are_refused() -> None:
    """Without a split, a text that is one token of the vocabulary is that token."""
    library = LIBRARY_OF["qwen2.5"]()
    library.model.ignore_merges = True
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with pytest.raises(DataError, match="a text encodes to its special tokens"):
        from_library_json(json.loads(library.to_str()), "x.json")


@pytest.mark.parametrize("damage", ["dropout", "no unknown word", "a panic"])
def test_a_tokenizer_that_cannot_encode_every_text_one_way_is_refused(damage: str) -> None:
    content = byte_level(("b", "c"))
    if damage == "dropout":
        content["model"]["dropout"] = 0.5
    elif damage == "no unknown word":
        library = tokenizers.Tokenizer(models.WordLevel({"the": 0}, "[UNK]"))
        content = json.loads(library.to_str())
    else:
        content["model"]["continuing_subword_prefix"] = "####"
    with pytest.raises(DataError, match=r"x\.json|no tokens for"):
        from_library_json(content, "x.json")


def test_ids_that_differ_between_the_libraries_are_an_error() -> None:
    other = PretrainedTokenizer(TOKENIZER.description)
    other._library = tokenizers.Tokenizer.from_str(json.dumps(byte_level(("a", "b"))))
    with pytest.raises(DataError, match="differ on"):
        require_same_ids(other)


def test_a_special_token_that_the_library_would_move_is_not_written() -> None:
    description = PretrainedDescription(
        type="file",
        end_of_document=399,
        vocab_size=400,
        special_tokens={"<end>": 399},
        tokenizer=byte_level(("a", "b")),
    )
    with pytest.raises(DataError, match="gives '<end>' another id"):
        library_json(PretrainedTokenizer(description))


TEXTS = (EUROPEAN, JAPANESE, " two  spaces", "灰 Łódź €", "👩‍👩‍👧 e\u0301 ▁x", "<0x41> <tool_call>")
of_family = functools.cache(tokenizer_of_family)
ids_of = st.lists(st.integers(0, 2**20), max_size=12)


def streamed(tokenizer: PretrainedTokenizer, ids: list[int], cut: int = 0) -> list[str]:
    after = ids[cut - 1] if cut else None
    decoder = TextDecoder(tokenizer, after=after)
    return [*map(decoder.add, ids[cut:]), decoder.close()]


@pytest.mark.parametrize("family", LIBRARY_OF)
@examples(60)
@given(numbers=ids_of, cut=st.integers(0, 12))
def test_streamed_text_is_the_decoded_text_for_any_ids_and_any_prompt(
    family: str, numbers: list[int], cut: int
) -> None:
    tokenizer = of_family(family)
    ids = [number % tokenizer.vocab_size for number in numbers]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    cut = min(cut, len(ids))
    raw, prompt = tokenizer.decode_bytes(ids), tokenizer.decode_bytes(ids[:cut])
    assert raw.startswith(prompt)
    expected = raw.removeprefix(prompt).decode("utf-8", errors="replace")
    assert "".join(streamed(tokenizer, ids, cut)) == expected


@pytest.mark.parametrize("family", LIBRARY_OF)
@examples(60)
@given(numbers=ids_of)
def test_decoded_text_is_that_of_the_library(family: str, numbers: list[int]) -> None:
    tokenizer = of_family(family)
    library = tokenizer._library
    ids = [number % (tokenizer.vocab_size - 1) for number in numbers]
    ids = [id_ for id_ in ids if id_ != tokenizer.end_of_document]
    expected = library.decode(ids, skip_special_tokens=False)
    # In bytes that are not UTF-8 the library has other numbers of replacement characters.
    if "\ufffd" not in expected:
        assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("family", LIBRARY_OF)
@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_decoded_as_by_the_library_and_streamed_by_complete_characters(
    family: str, text: str
) -> None:
    tokenizer = of_family(family)
    ids = tokenizer.encode(text).tolist()
    library = tokenizer._library
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    decoder, growing = TextDecoder(tokenizer), ""
    for stop, id_ in enumerate(ids, start=1):
        growing += decoder.add(id_)
        # The only bytes that are not UTF-8 are those of the character that is not complete.
        assert growing == tokenizer.decode_bytes(ids[:stop]).decode("utf-8", errors="ignore")
    assert decoder.close() == ""


@pytest.mark.parametrize("family", IN_BYTES)
@pytest.mark.parametrize("stop", ["灰", "Ł", "€"])
def test_a_stop_string_of_several_tokens_ends_the_text(family: str, stop: str) -> None:
    tokenizer = of_family(family)
    ids = tokenizer.encode(f"the sea {stop} is far").tolist()
    assert len(tokenizer.encode(stop)) > 1
    assert "".join(stream_text(iter(ids), tokenizer, TextLimits(stop=(stop,)))) == "the sea "


@pytest.mark.parametrize("family", LIBRARY_OF)
@examples(60)
@given(text=st.text(max_size=20) | st.sampled_from(TEXTS))
def test_bytes_of_tokens_are_exact_or_not_known(family: str, text: str) -> None:
    tokenizer = of_family(family)
    assert tokenizer.lossless == (family in ("gpt2", "llama3"))
    ids = tokenizer.encode(text)
    expected = len(text.encode()) if tokenizer.lossless else 0
    assert tokenizer.token_bytes()[ids].sum() == expected
    if tokenizer.lossless:
        assert tokenizer.decode_bytes(ids) == text.encode()
