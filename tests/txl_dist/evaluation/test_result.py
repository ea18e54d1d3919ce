"""Scores per word and per character, against a corpus that is counted by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import TextCounts
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from txl_dist.evaluation.result import (
    EvaluationResult,
    Result,
    ScoredText,
    Subject,
    scored_text,
)
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.spec import EvaluationSettings

TEXTS = ("the cat sat\non the mat\n", "größe @-@ maß\n")
WORDS, LINE_ENDS, CHARACTERS = 9, 3, 37

SETTINGS = EvaluationSettings(
    split="train",
    mode="exact",
    tgt_len=64,
    mem_len=640,
    clamp_len=400,
    same_length=True,
    reset="stream",
    precision="bf16",
)


def prepare(directory: Path, texts: Sequence[str], **settings: object) -> Path:
    folder = directory / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    prepare_dataset([folder], directory / "data", PrepareSettings(**settings))
    return directory / "data"


def result(text: ScoredText, *, nats: float, num_tokens: int) -> EvaluationResult:
    sums = LossSums(nats=nats, num_tokens=num_tokens, num_bytes=40)
    return EvaluationResult(
        sums=sums,
        settings=SETTINGS,
        num_chunks=1,
        overhead=0.0,
        text=text,
        data=Subject("books", "0123456789ab" + "c" * 52),
        model=Subject("run/step-00000009", "ba9876543210" + "f" * 52),
        weights="averaged",
        kernels=("sdpa on cpu",),
    )


def record(score: EvaluationResult) -> dict[str, Any]:
    written = score.record(checkpoint="runs/a", data="data/a", num_workers=1)
    content = written.to_json()
    assert Result.model_validate(json.loads(json.dumps(content))) == written
    return content


def test_word_perplexity_is_the_loss_per_word_line_end_and_document_end(tmp_path: Path) -> None:
    data = prepare(tmp_path, TEXTS)
    text = scored_text(open_split(data, "train"))
    assert text.document_ends == len(TEXTS) - 1  # the first one has no loss
    assert text.counts == TextCounts(words=WORDS, line_ends=LINE_ENDS, characters=CHARACTERS)
    score = result(text, nats=60.0, num_tokens=31)
    num_words = WORDS + LINE_ENDS + 1
    assert score.scores["word_perplexity"] == pytest.approx(math.exp(60.0 / num_words))
    assert score.scores["bits_per_character"] == pytest.approx(60.0 / CHARACTERS / math.log(2))


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": "wt103", "format": "text"},
        {"format": "text"},
        {"format": "lines"},
        {"recipe": "lm1b", "format": "text"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_the_word_perplexity_of_a_word_model_is_its_perplexity(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    texts = TEXTS[:1] if settings.get("recipe") == "wt103" else TEXTS
    data = prepare(tmp_path, texts, tokenizer="word", **settings)
    source = open_split(data, "train")
    text = scored_text(source)
    score = result(text, nats=20.0, num_tokens=source.num_tokens - 1)
    assert score.scores["word_perplexity"] == score.sums.perplexity
    if settings.get("recipe") != "lm1b":  # which marks both ends of a line
        assert text.num_words == source.num_tokens - 1  # so other models are comparable


def test_bytes_of_a_word_model_are_those_of_the_text(tmp_path: Path) -> None:
    """ASCII text, most of whose words are not in the vocabulary."""
    data = prepare(tmp_path, ["a bb  ccc a\n" * 3 + "dddddd\n"], tokenizer="word", vocab_size=5)
    text = scored_text(open_split(data, "train"))
    score = result(text, nats=20.0, num_tokens=14)
    assert score.scores["bits_per_byte"] == pytest.approx(score.scores["bits_per_character"])


def test_a_number_outside_the_range_of_a_float_is_null_in_json() -> None:
    text = ScoredText(TextCounts(words=1, line_ends=0, characters=37))
    score = result(text, nats=800.0, num_tokens=2)
    assert score.scores["word_perplexity"] == math.inf
    content = record(score)
    assert content["word_perplexity"] is None
    json.dumps(content, allow_nan=False)


def test_without_counts_the_scores_are_absent_and_the_reason_is_named(tmp_path: Path) -> None:
    data = prepare(tmp_path, TEXTS)
    for text, reason in (
        (ScoredText(), "the text was not counted"),
        (scored_text(open_split(data, "train"), max_tokens=5), "only the first 5 tokens"),
    ):
        score = result(text, nats=60.0, num_tokens=41)
        assert (score.scores["word_perplexity"], score.scores["bits_per_character"]) == (None, None)
        content = record(score)
        assert reason in content["not_counted"]
        assert reason in content["protocol"]


def test_the_protocol_names_everything_that_the_score_depends_on() -> None:
    text = ScoredText(TextCounts(words=9, line_ends=3, characters=37), document_ends=2)
    score = result(text, nats=60.0, num_tokens=1234)
    assert score.protocol == (
        "split train of books (sha256 0123456789ab), "
        "model run/step-00000009 (sha256 ba9876543210), "
        "1,234 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400, "
        "same_length true, reset stream, weights averaged, bf16, sdpa on cpu, "
        "word = whitespace-separated word (9), line end (3) or document end (2) of the text as "
        "prepared, not detokenized"
    )
    assert record(score)["protocol"] == score.protocol
    unlimited = replace(score, settings=replace(SETTINGS, clamp_len=None))
    assert "clamp_len none" in unlimited.protocol


def test_token_ids_have_no_words_and_no_characters(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [2, 2, 1]}\n')
    settings = PrepareSettings(format="ids", tokenizer="ids", vocab_size=4, end_of_document=3)
    prepare_dataset([tmp_path / "in.jsonl"], tmp_path / "data", settings)
    text = scored_text(open_split(tmp_path / "data", "train"))
    scores = record(result(text, nats=3.0, num_tokens=6))
    assert scores["word_perplexity"] is None
    assert scores["bits_per_character"] is None
    assert "token ids" in scores["not_counted"]
