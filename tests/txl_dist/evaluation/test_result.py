"""Scores per word, character and byte, against a corpus that is counted by hand; the protocol."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings, TextCounts, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from tests.support.prepared import prepared
from txl_dist.evaluation.result import ScoredText, named, protocol_line, scored_text
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.spec import EvaluationSettings

TEXTS = ("the cat sat\non the mat\n", "größe @-@ maß\n")
WORDS, LINE_ENDS, CHARACTERS = 9, 3, 37


def content_of(text: ScoredText, *, nats: float, num_tokens: int) -> dict[str, Any]:
    content = text.content(text.counted(LossSums(nats, num_tokens, num_bytes=40)))
    return content | content["scores"]


def test_word_perplexity_is_the_loss_per_word_line_end_and_document_end(tmp_path: Path) -> None:
    text = scored_text(open_split(prepared(tmp_path / "data", *TEXTS), "train"))
    assert text.document_ends == len(TEXTS) - 1  # the first one has no loss
    assert text.counts == TextCounts(words=WORDS, line_ends=LINE_ENDS, characters=CHARACTERS)
    scores = content_of(text, nats=60.0, num_tokens=31)
    num_words = WORDS + LINE_ENDS + 1
    assert scores["word_perplexity"] == pytest.approx(math.exp(60.0 / num_words))
    assert scores["bits_per_character"] == pytest.approx(60.0 / CHARACTERS / math.log(2))
    assert (scores["words_scored"], scores["characters_scored"]) == (WORDS, CHARACTERS)


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": "wt103", "format": "text"},
        {"format": "text"},
        {"format": "lines"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_the_word_perplexity_of_a_word_model_is_its_perplexity(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    texts = TEXTS[:1] if settings.get("recipe") == "wt103" else TEXTS
    source = open_split(prepared(tmp_path / "data", *texts, tokenizer="word", **settings), "train")
    text = scored_text(source)
    scores = content_of(text, nats=20.0, num_tokens=source.num_tokens - 1)
    assert scores["word_perplexity"] == scores["perplexity"]
    assert text.num_words == source.num_tokens - 1  # so other models are comparable


def test_the_words_of_lm1b_are_with_one_mark_per_line(tmp_path: Path) -> None:
    """Of `<S> the cat sat <S>` the paper's code predicts the cat sat <S>."""
    settings = {"recipe": "lm1b", "tokenizer": "word", "format": "text"}
    source = open_split(prepared(tmp_path / "data", *TEXTS, **settings), "train")
    num_targets = WORDS + 2 * LINE_ENDS - 1
    assert source.num_tokens - 1 == num_targets == 14
    scores = content_of(scored_text(source), nats=24.0, num_tokens=num_targets)
    assert scores["word_perplexity"] == pytest.approx(math.exp(24.0 / 12))
    assert scores["perplexity"] == pytest.approx(math.exp(24.0 / 14))
    part = content_of(scored_text(source, max_tokens=9), nats=24.0, num_tokens=8)
    assert part["word_perplexity"] is None


HALF_KNOWN = "a bb  ccc a\n" * 3 + "dddddd\n"
"""Of its words, a vocabulary of 5 ids has a and bb."""


def test_bytes_of_a_word_model_are_those_of_the_text(tmp_path: Path) -> None:
    """ASCII text, whose spaces no token tells."""
    data = prepared(tmp_path / "data", HALF_KNOWN, tokenizer="word")
    scores = content_of(scored_text(open_split(data, "train")), nats=20.0, num_tokens=17)
    assert scores["bits_per_byte"] == pytest.approx(scores["bits_per_character"])
    assert not {"unknown_targets", "not_counted"} & scores.keys()


def test_unknown_targets_are_named_and_leave_no_scores_per_byte_and_character(
    tmp_path: Path,
) -> None:
    data = prepared(tmp_path / "data", HALF_KNOWN, tokenizer="word", vocab_size=5)
    content = content_of(scored_text(open_split(data, "train")), nats=34.0, num_tokens=17)
    assert content["unknown_targets"] == 3 + 1  # ccc and dddddd
    assert (content["bits_per_byte"], content["bits_per_character"]) == (None, None)
    assert content["word_perplexity"] == pytest.approx(math.exp(2))
    assert content["not_counted"] == "unknown targets do not tell their text"


@pytest.mark.parametrize(("max_tokens", "expected"), [(3, 0), (4, 1), (9, 2), (99, 4)])
def test_unknown_targets_of_a_part_are_those_that_are_scored(
    max_tokens: int, expected: int, tmp_path: Path
) -> None:
    data = prepared(tmp_path / "data", HALF_KNOWN, tokenizer="word", vocab_size=5)
    text = scored_text(open_split(data, "train"), max_tokens=max_tokens)
    assert text.unknown_targets == expected


def test_an_unknown_token_that_begins_the_split_is_no_target(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", "b a a\n", recipe="wt103", tokenizer="word", min_freq=2)
    source = open_split(data, "train")
    assert source.read(0, 0, 1) == open_tokenizer(data).unknown_id
    assert scored_text(source).unknown_targets == 0


def test_half_a_character_that_is_not_scored_is_as_many_bytes_as_its_token(tmp_path: Path) -> None:
    """A text without a token that begins it: its first byte has no prediction."""
    data = prepared(tmp_path / "data", "\u65e5\u672c" * 9, recipe="enwik8", format="text")
    source = open_split(data, "train")
    assert scored_text(source).num_bytes == source.num_tokens - 1


def test_a_number_outside_the_range_of_a_float_has_no_value() -> None:
    text = ScoredText(TextCounts(words=1, line_ends=0, characters=37))
    assert content_of(text, nats=800.0, num_tokens=2)["word_perplexity"] is None


def test_without_counts_the_scores_are_absent_and_the_reason_is_named(tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [2, 2, 1]}\n')
    ids = PrepareSettings(format="ids", tokenizer="ids", vocab_size=4, end_of_document=3)
    prepare_dataset([tmp_path / "ids.jsonl"], tmp_path / "ids", ids)
    data = prepared(tmp_path / "data", *TEXTS)
    for text, reason in (
        (scored_text(open_split(data, "train"), max_tokens=5), "only the first 5 tokens"),
        (scored_text(open_split(tmp_path / "ids", "train")), "token ids, which have no text"),
    ):
        content = content_of(text, nats=60.0, num_tokens=41)
        assert (content["word_perplexity"], content["bits_per_character"]) == (None, None)
        assert reason in content["not_counted"]
        assert reason in text.definition_of_a_word


def test_the_protocol_names_everything_that_the_score_depends_on() -> None:
    settings = EvaluationSettings(
        split="train", mode="exact", tgt_len=64, mem_len=640, clamp_len=400, same_length=True,
        reset="stream", precision="bf16",
    )  # fmt: skip
    text = ScoredText(TextCounts(words=9, line_ends=3, characters=37), document_ends=2)
    facts: dict[str, Any] = {
        "num_tokens": 1234,
        "unknown_targets": 0,
        "data": named("books", "0123456789ab" + "c" * 52),
        "model": named("run/step-00000009", "ba9876543210" + "f" * 52),
        "memory": "recurrent",
        "weights": "averaged",
        "kernels": {"sdpa on cpu"},
        "definition_of_a_word": text.definition_of_a_word,
    }
    assert protocol_line(settings, **facts) == (
        "split train of books (sha256 0123456789ab), "
        "model run/step-00000009 (sha256 ba9876543210), "
        "1,234 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400, "
        "same_length true, reset stream, weights averaged, bf16, sdpa on cpu, "
        "word = whitespace-separated word (9), line end (3) or document end (2) of the text as "
        "prepared, not detokenized"
    )
    line = protocol_line(settings, **facts | {"unknown_targets": 617})
    assert "1,234 tokens scored, 617 unknown targets (50.00%), mode exact" in line
    part = replace(settings, clamp_len=None, max_tokens=1235)
    line = protocol_line(part, **facts | {"memory": "tokens"})
    assert line.startswith("first 1,235 tokens of split train of books")
    assert "memory tokens, mem_len 640, clamp_len none" in line
