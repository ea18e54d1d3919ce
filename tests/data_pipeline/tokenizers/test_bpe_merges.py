"""Merges learned from counts are those of `tokenizers`, ties included."""

import json
from collections import Counter

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from data_pipeline.tokenizers import bpe_merges
from data_pipeline.tokenizers.bpe import bpe_of_counts, count_words, train_bpe
from tests.data_pipeline.tokenizers.sample_tokenizers import SAMPLE

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


@given(
    texts=st.lists(WORDS, min_size=1, max_size=12),
    min_freq=st.integers(1, 3),
    few=st.sampled_from([2, bpe_merges._FEW]),
    rare_share=st.sampled_from([1, 3, bpe_merges._RARE_SHARE]),
)
@example(texts=["aaaaa aaa aaaa", "aaaaaaaaa"], min_freq=1, few=2, rare_share=1)
@example(texts=["abab ababa babab"], min_freq=2, few=2, rare_share=3)
def test_any_words_give_the_vocabulary_of_the_library(
    texts: list[str], min_freq: int, few: int, rare_share: int
) -> None:
    if not any(texts):
        return
    expected = trained_by_library(texts, 270, min_freq)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe_merges, "_FEW", few)
        patch.setattr(bpe_merges, "_RARE_SHARE", rare_share)
        patch.setattr(bpe_merges, "_RARE_STEP", 2)
        trained = train_bpe(texts, vocab_size=271, min_freq=min_freq, max_bytes=2**20)
    assert json.loads(trained.to_json())["tokenizer"]["model"] == expected


def test_real_text_gives_the_vocabulary_of_the_library() -> None:
    expected = trained_by_library(SAMPLE, 1500, 2)
    trained = train_bpe(SAMPLE, vocab_size=1501, max_bytes=2**30)
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
