"""Byte-level BPE trained here has the ids of the `tokenizers` library."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from data_pipeline.tokenizers.bpe import train_bpe
from data_pipeline.tokenizers.pretrained import (
    HARD_STRINGS,
)
from tests.data_pipeline.tokenizers.sample_tokenizers import SAMPLE, SETTINGS, TOKENIZER, trained


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


def test_a_text_that_trains_too_long_a_token_is_refused() -> None:
    texts = [("a" * 5000 + " ") * 50]
    with pytest.raises(DataError, match=r"bytes, the maximum is .* long runs"):
        train_bpe(iter(texts), vocab_size=300, min_freq=None, max_bytes=2**20)
