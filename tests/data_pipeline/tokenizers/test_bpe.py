"""Byte-level BPE trained here, and tokenizers brought as files: same ids as the library's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.preparation.tokenization import tokenize_document
from data_pipeline.tokenizers import load_tokenizer, ready_tokenizer, train_tokenizer
from data_pipeline.tokenizers.pretrained import (
    HARD_STRINGS,
    PretrainedTokenizer,
    from_library_json,
    require_same_ids,
)
from data_pipeline.tokenizers.tiktoken_ranks import ranked_bytes

SETTINGS = PrepareSettings(tokenizer="bpe", vocab_size=500)
FILE = PrepareSettings(tokenizer="file")
SAMPLE = [
    "The quick brown fox's den isn't far; they'll be back by 1984.\n\n    indented  text\r\n" * 5,
    "潮は満ちる. السلام عليكم. aaaaaaaaaaaaaaa 👩‍👩‍👧 naïve <|endoftext|>" * 4,
    Path(__file__).read_text("utf-8"),
]


def trained() -> PretrainedTokenizer:
    tokenizer = train_tokenizer(SETTINGS, lambda: iter(SAMPLE))
    assert isinstance(tokenizer, PretrainedTokenizer)
    return tokenizer


TOKENIZER = trained()


@given(st.text() | st.text(alphabet="ae \n't19!\u00a0\u2028\u1680\x1c"))
def test_any_text_comes_back_with_the_ids_of_the_library(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids.tolist() == TOKENIZER.library_ids(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    assert TOKENIZER.token_bytes()[ids].sum() == len(text.encode())
    assert TOKENIZER.end_of_document not in ids


@pytest.mark.parametrize("text", HARD_STRINGS)
def test_hard_strings_have_the_ids_of_the_library(text: str) -> None:
    for joined in (text, text * 3, text + "\n", " " + text, f"x{text}x"):
        assert TOKENIZER.encode(joined).tolist() == TOKENIZER.library_ids(joined)
        assert TOKENIZER.decode(TOKENIZER.encode(joined)) == joined


@pytest.mark.slow
def test_every_character_is_of_the_same_class_for_both_libraries() -> None:
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    for start in range(0, len(points), 64):
        group = points[start : start + 64]
        text = "|".join("a{0}1 {0}! {0}  {0}".format(chr(point)) for point in group)
        assert TOKENIZER.encode(text).tolist() == TOKENIZER.library_ids(text), hex(group[0])


def test_vocabulary_and_end_of_document_are_as_asked_for() -> None:
    assert TOKENIZER.vocab_size == 500
    assert TOKENIZER.end_of_document == 499
    assert TOKENIZER.token_bytes()[499] == 0
    assert TOKENIZER.decode([499, *TOKENIZER.encode("a b"), 499]) == "a b"
    assert TOKENIZER.encode("x").dtype == "<u2"
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        TOKENIZER.encode("a\ud800b")
    with pytest.raises(ValueError, match="500"):
        TOKENIZER.decode([500])


def test_training_again_gives_the_same_digest() -> None:
    assert trained().digest == TOKENIZER.digest
    assert load_tokenizer(json.loads(TOKENIZER.to_json())).digest == TOKENIZER.digest


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_and_hash_seeds_do_not_change_the_training(threads: str) -> None:
    program = (
        "from tests.data_pipeline.tokenizers.test_bpe import TOKENIZER; print(TOKENIZER.digest)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == TOKENIZER.digest


def test_training_takes_no_more_than_the_bytes_it_may() -> None:
    limited = SETTINGS.model_copy(update={"train_bytes": 300})
    short = train_tokenizer(limited, lambda: iter([SAMPLE[0], "z" * 999]))
    same = train_tokenizer(limited, lambda: iter([SAMPLE[0][:300]]))
    assert short.digest == same.digest != TOKENIZER.digest
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(SETTINGS, lambda: iter([]))


def damaged(name: str) -> dict[str, object]:
    content = json.loads(TOKENIZER.to_json())
    model = content["tokenizer"]["model"]
    vocab, merges = model["vocab"], model["merges"]
    last = "".join(merges[-1])
    if name == "gap":
        vocab[last] = 5000
    elif name == "two tokens of one id":
        vocab[last] = 7
    elif name == "a merge less":
        merges.pop()
    elif name == "merges out of order":
        merges[5], merges[20] = merges[20], merges[5]
    elif name == "ids out of order":
        first = "".join(merges[0])
        vocab[first], vocab[last] = vocab[last], vocab[first]
    elif name == "no token":
        model["vocab"] = {}
    elif name == "a normalizer":
        content["tokenizer"]["normalizer"] = {"type": "NFC"}
    elif name == "another split":
        content["tokenizer"]["pre_tokenizer"]["add_prefix_space"] = True
    elif name == "end in the vocabulary":
        content["end_of_document"] = 300
    elif name == "end too high":
        content["end_of_document"] = 700
    elif name == "end no number":
        content["end_of_document"] = True
    elif name == "no library":
        content["tokenizer"] = {"model": 3}
    return content


@pytest.mark.parametrize(
    "name",
    [
        "gap",
        "two tokens of one id",
        "a merge less",
        "merges out of order",
        "ids out of order",
        "no token",
        "a normalizer",
        "another split",
        "end in the vocabulary",
        "end too high",
        "end no number",
        "no library",
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(damaged(name)))
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(path)


def byte_level(*pairs: tuple[str, str]) -> dict[str, object]:
    """The library's JSON of byte-level BPE with these merges."""
    vocab = {token: id_ for id_, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(pairs)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return json.loads(library.to_str())


def test_merges_on_which_tiktoken_would_differ_go_through_the_library() -> None:
    """`abc` is made of ab and c only, but bc comes first: the library leaves a and bc apart."""
    content = byte_level(("b", "c"), ("a", "b"), ("ab", "c"))
    with pytest.raises(ValueError, match="abc"):
        ranked_bytes(content, leave_out=None)
    tokenizer = from_library_json(content, "x.json")
    assert tokenizer.cuts == "never"
    assert not tokenizer.lossless
    assert tokenizer.encode("abc").tolist() == tokenizer.library_ids("abc")
    assert len(tokenizer.encode("abc")) == 2


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
    assert tokenizer.token_bytes()[:3].tolist() == [6, 4, 4]
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        tokenizer.encode("the \ud800")


def with_unknown_as_only_special(kind: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(
        models.BPE(unk_token="[UNK]") if kind == "bpe" else models.Unigram()
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = (
        trainers.BpeTrainer(special_tokens=["[UNK]"], show_progress=False)
        if kind == "bpe"
        else trainers.UnigramTrainer(
            special_tokens=["[UNK]"], unk_token="[UNK]", show_progress=False
        )
    )
    library.train_from_iterator(["the cat sat", "[ U N K ] x"] * 9, trainer)
    return library


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_token_for_what_is_unknown_never_ends_a_document(tmp_path: Path, kind: str) -> None:
    tokenizer = ready_tokenizer(FILE, saved(tmp_path, with_unknown_as_only_special(kind)))
    ids = tokenizer.encode("the cat 漢 sat")
    assert 0 in ids, "the unknown token"
    assert tokenizer.end_of_document == tokenizer.vocab_size - 1
    assert tokenizer.end_of_document not in ids


def test_a_document_that_holds_the_end_of_document_token_is_refused_by_name() -> None:
    content = json.loads(with_unknown_as_only_special("bpe").to_str())
    description = {"type": "file", "end_of_document": 0, "tokenizer": content}
    tokenizer = PretrainedTokenizer.from_description(description)
    assert len(list(tokenize_document(tokenizer, ["the cat sat"], document_id="a.txt"))) == 2
    with pytest.raises(DataError, match=r"b\.txt contains text .* end-of-document token, id 0"):
        list(tokenize_document(tokenizer, ["the cat 漢 sat"], document_id="b.txt"))


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


def test_a_datasets_own_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.to_json())
    assert ready_tokenizer(FILE, path).digest == TOKENIZER.digest


@pytest.mark.parametrize(
    "content",
    ["[]", '{"model": {}}', '{"model": {"type": "BPE", "vocab": {"a": 4}, "merges": []}}'],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError):
        ready_tokenizer(FILE, path)


def test_a_file_is_given_exactly_for_kind_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file"):
        ready_tokenizer(FILE)
    with pytest.raises(ConfigError, match="byte"):
        ready_tokenizer(PrepareSettings(), tmp_path / "x")


def test_ids_that_differ_between_the_libraries_are_an_error() -> None:
    other = PretrainedTokenizer.from_description(json.loads(TOKENIZER.to_json()))
    other._library = tokenizers.Tokenizer.from_str(json.dumps(byte_level(("a", "b"))))
    with pytest.raises(DataError, match="differ on"):
        require_same_ids(other, [])
