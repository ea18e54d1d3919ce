"""gigatoken gives the ids of `tokenizers`, or does not encode."""

import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.tokenizers import encoders, load_tokenizer
from data_pipeline.tokenizers.bpe import bpe_of_counts, count_words
from data_pipeline.tokenizers.encoders import (
    BYTE_OF,
    CHARACTERS_OF_EARLIER_VERSIONS,
    OTHER_CLASS,
    GigatokenEncoder,
    reason_without_gigatoken,
)
from data_pipeline.tokenizers.pretrained import PretrainedTokenizer, from_library_json
from tests.data_pipeline.tokenizers.sample_tokenizers import SAMPLE, TOKENIZER, byte_level

CONTEXTS = "{0}\na{0}a\n1{0}1\n {0} {0}  {0}\n!{0}!\n{0}{0}\n"
"""A character at the start, after and before a letter, digit, blank, mark and itself."""


def revealing() -> tuple[GigatokenEncoder, tokenizers.Tokenizer]:
    """Both libraries with merges of every byte and its neighbour, which show where texts split."""
    character_of = {byte: character for character, byte in BYTE_OF.items()}
    contexts = [character_of[byte] for byte in b"a1 !\n"]
    pairs = {(c, b): None for c in contexts for b in BYTE_OF}
    pairs |= {(b, c): None for c in contexts for b in BYTE_OF}
    content = json.dumps(byte_level(*pairs))
    return GigatokenEncoder(content), tokenizers.Tokenizer.from_str(content)


ENCODER, LIBRARY = revealing()


def differs(text: str) -> bool:
    ids = ENCODER._backend.encode(text).tolist()
    return ids != LIBRARY.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
def test_the_characters_that_gigatoken_splits_otherwise_are_those_that_it_never_gets() -> None:
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    found = ""
    for start in range(0, len(points), 256):
        group = [chr(point) for point in points[start : start + 256]]
        if differs("".join(map(CONTEXTS.format, group))):
            found += "".join(each for each in group if differs(CONTEXTS.format(each)))
    assert found == "".join(chr(point) for point in points if OTHER_CLASS.match(chr(point)))


def boundaries() -> Iterator[str]:
    """The first and last character of every range of `OTHER_CLASS`, and their neighbours."""
    for code in re.findall(r"\\u(\w{4})|\\U(\w{8})", OTHER_CLASS.pattern):
        end = int("".join(code), 16)
        yield from (chr(end + step) for step in (-1, 0, 1))


def test_the_ends_of_all_ranges_that_differ_are_right() -> None:
    characters = list(boundaries())
    assert len(characters) > 100
    for character in characters:
        text = CONTEXTS.format(character)
        assert differs(text) == bool(OTHER_CLASS.match(character)), hex(ord(character))
    assert not differs(CHARACTERS_OF_EARLIER_VERSIONS)


def real_documents(number: int) -> Iterator[str]:
    """The beginnings of files that are installed."""
    paths = sysconfig.get_paths()
    files = chain(*(sorted(Path(paths[key]).rglob("*.py")) for key in ("stdlib", "purelib")))
    yield from islice((path.read_text(errors="replace")[:20_000] for path in files), number)


def random_documents(number: int) -> Iterator[str]:
    """Characters of all of Unicode, some repeated, between words and blanks."""
    choice = random.Random(0)
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    for _ in range(number):
        parts = choice.choices(characters, k=choice.randrange(60))
        parts += choice.choices([" ", "\n", "a", "The", "1", "'s", "  "], k=choice.randrange(60))
        choice.shuffle(parts)
        yield "".join(part * choice.choice([1, 1, 1, 2, 5]) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [real_documents, random_documents])
def test_ten_thousand_documents(documents: Callable[[int], Iterator[str]]) -> None:
    texts = list(documents(10_000))
    assert len(texts) == 10_000
    training = islice(chain(*zip(random_documents(10_000), texts, strict=True)), 4000)
    tokenizer = bpe_of_counts(count_words(training, max_bytes=2**24), vocab_size=8000)
    tokens, lengths = tokenizer.encode_batch(texts)
    starts = np.cumsum([0, *lengths])
    library = tokenizer.library_ids
    for text, start, stop in zip(texts, starts, starts[1:], strict=False):
        assert tokens[start:stop].tolist() == library(text), text[:200]


def test_the_caches_are_emptied_when_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = GigatokenEncoder(json.dumps(byte_level(("a", "b"))))
    first, expected = encoder._backend, encoder.encode("ab ba")
    monkeypatch.setattr(encoders, "_CHECK_BYTES", 5)
    encoder.encode("ab ba")
    assert encoder._backend is first, "it has not grown"
    monkeypatch.setattr(encoders, "resident_bytes", lambda: encoder._limit + 1)
    encoder.encode("ab ba")
    assert encoder._backend is not first
    assert expected is not None
    assert encoder.encode("ab ba").tolist() == expected.tolist()


@pytest.mark.slow
def test_memory_stays_bounded_over_words_that_are_all_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoders, "MAX_GROWTH_BYTES", 16 * 2**20)
    encoder = GigatokenEncoder(json.dumps(byte_level(("a", "b"))))
    words = random.Random(0)
    sizes = []
    for _ in range(24):
        encoder.encode(" ".join(f"{words.getrandbits(48):x}" for _ in range(160_000)))
        sizes.append(encoders.resident_bytes())
    assert max(sizes[12:]) < max(sizes[:12]) + 32 * 2**20


@pytest.mark.parametrize("cause", ["not installed", "is 0.11.0", "another Unicode version"])
def test_without_a_compared_gigatoken_the_ids_are_the_same_and_the_reason_is_known(
    monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    if cause == "not installed":
        monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    elif cause == "is 0.11.0":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0.11.0")
    else:
        characters = CHARACTERS_OF_EARLIER_VERSIONS + "\u088fa"
        monkeypatch.setattr(encoders, "CHARACTERS_OF_EARLIER_VERSIONS", characters)
    reason_without_gigatoken.cache_clear()
    other = load_tokenizer(json.loads(TOKENIZER.to_json()))
    assert isinstance(other, PretrainedTokenizer)
    try:
        assert cause in other.slow_reason
        assert other.encode("it's\u088f").tolist() == TOKENIZER.library_ids("it's\u088f")
    finally:
        monkeypatch.undo()
        reason_without_gigatoken.cache_clear()
    assert other.encoder.startswith("tokenizers ")
    assert TOKENIZER.encoder == "gigatoken 0.10.0"
    assert other.encode(SAMPLE[2]).tolist() == TOKENIZER.encode(SAMPLE[2]).tolist()


Content = dict[str, Any]


def reorder(vocab: Content, merges: list[list[str]]) -> None:
    first, last = "".join(merges[0]), "".join(merges[-1])
    vocab[first], vocab[last] = vocab[last], vocab[first]


DAMAGES: dict[str, Callable[[Content, Content, list[list[str]]], object]] = {
    "gap": lambda content, vocab, merges: vocab.update({"".join(merges[-1]): 5000}),
    "two tokens of one id": lambda content, vocab, merges: vocab.update({"".join(merges[-1]): 7}),
    "a merge less": lambda content, vocab, merges: merges.pop(),
    "merges out of order": lambda content, vocab, merges: merges.insert(20, merges.pop(5)),
    "ids out of order": lambda content, vocab, merges: reorder(vocab, merges),
    "no token": lambda content, vocab, merges: vocab.clear(),
    "a normalizer": lambda content, vocab, merges: content["tokenizer"].update(
        normalizer={"type": "NFC"}
    ),
    "another split": lambda content, vocab, merges: content["tokenizer"]["pre_tokenizer"].update(
        add_prefix_space=True
    ),
    "end in the vocabulary": lambda content, vocab, merges: content.update(end_of_document=300),
    "end too high": lambda content, vocab, merges: content.update(end_of_document=700),
    "end no number": lambda content, vocab, merges: content.update(end_of_document=True),
    "no library": lambda content, vocab, merges: content.update(tokenizer={"model": 3}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content = json.loads(TOKENIZER.to_json())
    model = content["tokenizer"]["model"]
    DAMAGES[name](content, model["vocab"], model["merges"])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(path)


@given(
    sides=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=20),
    texts=st.lists(st.text(alphabet="abc ", max_size=60), min_size=1),
)
@example(sides=[(1, 2), (0, 1), (4, 2)], texts=["abc"])  # bc comes before abc, so a stays alone
def test_any_merges_give_the_ids_of_the_library(
    sides: list[tuple[int, int]], texts: list[str]
) -> None:
    tokens, merges = ["a", "b", "c"], []
    for left, right in sides:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if len("".join(pair)) < 40 and "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
    tokenizer = from_library_json(byte_level(*merges), "x.json")
    assert tokenizer.lossless
    for text in texts:
        assert tokenizer.encode(text).tolist() == tokenizer.library_ids(text)


def test_a_merge_of_a_later_token_goes_through_the_library() -> None:
    content = byte_level(("b", "c"), ("a", "bc"))
    content["model"]["merges"].reverse()
    vocab = content["model"]["vocab"]
    vocab["bc"], vocab["abc"] = vocab["abc"], vocab["bc"]
    tokenizer = from_library_json(content, "x.json")
    assert tokenizer.cuts == "never"
    assert "do not lead to the token 'abc'" in tokenizer.slow_reason
    assert tokenizer.encode("abc").tolist() == tokenizer.library_ids("abc")
