"""Scores per word and per character, against a corpus that is counted by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.shards.text_counts import TextCounts
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.evaluation.job import EvaluationSettings
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.evaluation.scored_text import ScoredText, scored_text

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
        weights="averaged",
        kernels=("biased_attention on cpu",),
    )


def test_word_perplexity_is_the_loss_per_word_and_line_end(tmp_path: Path) -> None:
    data = prepare(tmp_path, TEXTS)
    text = scored_text(open_split(data, "train"))
    assert text.counts == TextCounts(words=WORDS, line_ends=LINE_ENDS, characters=CHARACTERS)
    score = result(text, nats=60.0, num_tokens=41)
    assert score.word_perplexity == pytest.approx(math.exp(60.0 / (WORDS + LINE_ENDS)))
    assert score.bits_per_character == pytest.approx(60.0 / CHARACTERS / math.log(2))


def test_the_word_perplexity_of_a_word_model_is_its_perplexity(tmp_path: Path) -> None:
    """The recipe has no end-of-document token, so the first word is not scored."""
    data = prepare(tmp_path, TEXTS[:1], tokenizer="word", recipe="wt103", format="text")
    source = open_split(data, "train")
    text = scored_text(source)
    assert text.num_words == source.num_tokens - 1
    score = result(text, nats=20.0, num_tokens=source.num_tokens - 1)
    assert score.word_perplexity == score.sums.perplexity


def test_without_counts_the_scores_are_absent_and_the_reason_is_named(tmp_path: Path) -> None:
    data = prepare(tmp_path, TEXTS)
    manifest = load_manifest(data)
    older = manifest.splits["train"].model_copy(update={"text_counts": None})
    source = open_split(
        data, "train", manifest=manifest.model_copy(update={"splits": {"train": older}})
    )
    for text, reason in (
        (scored_text(source), "prepare the text again"),
        (scored_text(open_split(data, "train"), max_tokens=5), "only the first 5 tokens"),
    ):
        score = result(text, nats=60.0, num_tokens=41)
        assert (score.word_perplexity, score.bits_per_character) == (None, None)
        content = score.to_json()
        assert reason in content["not_counted"]
        assert reason in content["protocol"]


def test_the_protocol_names_everything_that_the_score_depends_on() -> None:
    text = ScoredText(TextCounts(words=9, line_ends=3, characters=37))
    score = result(text, nats=60.0, num_tokens=1234)
    assert score.protocol == (
        "split train, 1,234 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400, "
        "same_length true, reset stream, weights averaged, bf16, biased_attention on cpu, "
        "word = whitespace-separated word (9) or line end (3) of the text as prepared, "
        "not detokenized"
    )
    assert score.to_json()["protocol"] == score.protocol
    unlimited = replace(score, settings=replace(SETTINGS, clamp_len=None))
    assert "clamp_len none" in unlimited.protocol
