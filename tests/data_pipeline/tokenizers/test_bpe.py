"""Byte-level BPE trained here has the ids and merges of the `tokenizers` library."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from data_pipeline.errors import DataError
from data_pipeline.tokenizers import bpe, load_tokenizer, train_tokenizer
from data_pipeline.tokenizers.bpe import _sample, bpe_of_counts, count_words
from data_pipeline.tokenizers.pretrained import HARD_STRINGS
from tests.data_pipeline.tokenizers.sample_tokenizers import SAMPLE, SETTINGS, TOKENIZER, trained


@given(
    st.text()
    | st.sampled_from(HARD_STRINGS)
    | st.sampled_from([part for text in SAMPLE for part in text.split("\n")])
    | st.text(alphabet="ae \n't19!\u00a0\u2028\u1680\x1c\u088f\U00010940\u0c5c")
)
def test_any_text_comes_back_with_the_ids_of_the_library(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids.tolist() == TOKENIZER.library_ids(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    assert TOKENIZER.token_bytes()[ids].sum() == len(text.encode())
    assert TOKENIZER.end_of_document not in ids


def test_vocabulary_and_end_of_document_are_as_asked_for() -> None:
    assert TOKENIZER.vocab_size == 500
    assert TOKENIZER.end_of_document == 499
    assert TOKENIZER.token_bytes()[499] == 0
    assert TOKENIZER.decode([499, *TOKENIZER.encode("a b"), 499]) == "a b"
    assert TOKENIZER.encode("x").dtype == "<u2"


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


def test_a_long_run_of_one_character_gives_a_long_token() -> None:
    texts = [("a" * 5000 + " ") * 50]
    tokenizer = bpe_of_counts(count_words(iter(texts), max_bytes=2**20), vocab_size=300)
    assert tokenizer.token_bytes().max() > 2000
    assert tokenizer.encode(texts[0]).tolist() == tokenizer.library_ids(texts[0])


WORDS = st.text(alphabet="aab", min_size=1, max_size=9) | st.text(alphabet="abc é", max_size=5)


def trained_by_library(texts: list[str], vocab_size: int, min_freq: int) -> dict[str, object]:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_freq,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    model: dict[str, object] = json.loads(library.to_str())["model"]
    return model


@given(texts=st.lists(WORDS, min_size=1, max_size=12), min_freq=st.integers(1, 3))
@example(texts=["aaaaa aaa aaaa", "aaaaaaaaa"], min_freq=1)
@example(texts=["abab ababa babab"], min_freq=2)
def test_any_words_give_the_vocabulary_of_the_library(texts: list[str], min_freq: int) -> None:
    if not any(texts):
        return
    expected = trained_by_library(texts, 270, min_freq)
    counts = count_words(texts, max_bytes=2**20)
    trained = bpe_of_counts(counts, vocab_size=271, min_freq=min_freq)
    assert json.loads(trained.to_json())["tokenizer"]["model"] == expected


def test_counts_do_not_depend_on_parts_or_on_the_library_that_splits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = ["it's <|endoftext|> a\u088fb  12", *SAMPLE]
    counts = count_words(texts, max_bytes=2**30)
    assert capfd.readouterr() == ("", ""), "gigatoken prints while it counts"
    parts = [count_words([text], max_bytes=2**30) for text in texts]
    assert sum(parts, Counter()) == counts
    monkeypatch.setattr("data_pipeline.tokenizers.bpe.reason_without_gigatoken", lambda: "none")
    assert count_words(texts, max_bytes=2**30) == counts
    reordered = Counter(dict(reversed(counts.items())))
    digests = {bpe_of_counts(each, vocab_size=400).digest for each in (counts, reordered)}
    assert len(digests) == 1


@given(
    counts=st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 99), min_size=1),
    data=st.data(),
)
def test_a_sample_has_every_word_in_its_share(counts: dict[str, int], data: st.DataObject) -> None:
    num_bytes = sum(len(word) * count for word, count in counts.items())
    sample_bytes = data.draw(st.integers(1, num_bytes))
    sample = Counter(" ".join(_sample(Counter(counts), sample_bytes, num_bytes)).split())
    for word, count in counts.items():
        assert abs(sample[word] - count * sample_bytes / num_bytes) < 1
    assert sample.total() == sum(counts.values()) * sample_bytes // num_bytes


def test_a_sample_of_a_long_text_compresses_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path(json.__file__).parents[1].glob("[a-c]*.py")
    texts = [path.read_text("utf-8") for path in sorted(library)]
    counts = count_words(texts, max_bytes=2**30)
    whole = bpe_of_counts(counts, vocab_size=700)
    monkeypatch.setattr(bpe, "SAMPLE_BYTES", sum(map(len, texts)) // 4)
    sampled = bpe_of_counts(counts, vocab_size=700)
    assert sampled.digest != whole.digest
    sizes = [len(each.encode("".join(texts))) for each in (whole, sampled)]
    assert sizes[1] < 1.01 * sizes[0]
