"""Traces of steps, and the warning of a run that does not learn."""

import json
from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.streams.cursor import LaneCursor
from tests.support.gloo_ranks import RankGroups
from tests.support.hypothesis_examples import examples
from tests.support.token_sources import TextSource, random_corpus
from tests.support.training_runs import NO_EVALUATION, TINY, metrics, tiny_job, train
from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.evaluation.scores import LossSums
from txl_dist.runtime.world import World
from txl_dist.training import diagnostics
from txl_dist.training.diagnostics import LearningCheck, tokens_before_check, unigram_entropy
from txl_dist.training.job import TrainJob

# Traces of the steps and ranks that were asked for, and no files otherwise.


def test_a_trace_has_the_steps_that_were_asked_for(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    job = tiny_job(
        dataset, tmp_path, NO_EVALUATION, "training.num_steps=5", "optimizer.warmup_steps=0",
        "training.profile_steps=[2, 3]",
    )  # fmt: skip
    assert ranks(1).run(train, job) == [0]
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank-0-step-2.json"
    events = json.loads(path.read_text())["traceEvents"]
    updates = [event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(updates) == 2


@pytest.mark.parametrize("steps", ["[0, 3]", "[4, 3]"])
def test_steps_that_do_not_exist_are_refused(dataset: Path, tmp_path: Path, steps: str) -> None:
    with pytest.raises(ConfigError, match="first and the last step"):
        tiny_job(dataset, tmp_path, f"training.profile_steps={steps}")


def test_a_range_that_a_resume_divides_has_a_file_for_each_part(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    for num_steps in (4, 6):
        job = tiny_job(
            dataset, tmp_path, NO_EVALUATION, f"training.num_steps={num_steps}",
            "optimizer.warmup_steps=0", "training.profile_steps=[3, 6]",
            allow_change=("training.num_steps",),
        )  # fmt: skip
        assert ranks(1).run(train, job) == [0]
    assert sorted(path.name for path in (tmp_path / "profile").glob("*.json")) == [
        "rank-0-step-3.json",
        "rank-0-step-5.json",
    ]


def test_a_trace_after_the_end_of_the_run_is_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins after the end of the run"):
        tiny_job(dataset, tmp_path, "training.num_steps=5", "training.profile_steps=[6, 7]")


# A run whose loss stays at the unigram entropy of its data warns once; one that learns never.


def config(*overrides: str) -> RunConfig:
    return load_run_config(TINY, ["data.path=none", "directory=none", *overrides])


def warnings(losses: list[float], *, tokens_per_line: int, done: int = 0) -> list[int]:
    """The lines after which a check at 1,000 tokens of data with an entropy of 2 nats warns."""
    check = LearningCheck(config(), 2.0, 1000, is_done=done >= 1000)
    lines = []
    for number, loss in enumerate(losses, 1):
        sums = LossSums(loss * tokens_per_line, tokens_per_line)
        if check.warning(done + number * tokens_per_line, sums):
            lines.append(number)
    return lines


@pytest.mark.parametrize(
    ("losses", "tokens_per_line", "lines"),
    [
        ([9.0] * 8 + [2.0] * 20, 100, [10]),
        ([9.0] * 8 + [1.91, 1.91] + [1.5] * 20, 100, [10]),  # not clearly below
        ([9.0] * 8 + [2.3, 1.3] + [9.0] * 20, 100, []),  # the mean of the last fifth
        ([1.5] * 40, 30, []),
        ([5.0, 1.5, 1.5], 5000, []),  # the mean of a line with the first steps says nothing
        ([5.0, 2.1, 2.1], 5000, [2]),
    ],
)
def test_the_mean_before_the_stated_number_of_tokens_decides_once(
    losses: list[float], tokens_per_line: int, lines: list[int]
) -> None:
    assert warnings(losses, tokens_per_line=tokens_per_line) == lines


def test_a_run_resumed_after_the_check_does_not_repeat_it() -> None:
    assert warnings([2.0] * 20, tokens_per_line=100, done=400) == [6]
    assert warnings([2.0] * 20, tokens_per_line=100, done=1000) == []


@pytest.mark.parametrize(
    ("num_steps", "warmup_steps", "vocab_size", "tokens"),
    [
        (20, 4, 257, None),  # 300 tokens say nothing
        (10**6, 4, 257, 250_000),
        (10**6, 4, 40_000, 4_000_000),
        (10**6, 100_000, 257, 3_000_000),
        (100_000, 4, 40_000, 1_350_000),  # most of 1,500,000
    ],
)
def test_the_number_of_tokens_depends_on_vocabulary_warm_up_and_length(
    num_steps: int, warmup_steps: int, vocab_size: int, tokens: int | None
) -> None:
    settings = (f"training.num_steps={num_steps}", f"optimizer.warmup_steps={warmup_steps}")
    assert tokens_before_check(config(*settings), vocab_size=vocab_size) == tokens


def train_checking_early(world: World, job: TrainJob) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnostics, "MIN_TOKENS", 400)
        patch.setattr(diagnostics, "MIN_STEPS", 60)
        patch.setattr(diagnostics, "TOKENS_PER_ID", 1)
        return train(world, job)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that is learned in a few steps; with a split valid."""
    folder = tmp_path_factory.mktemp("text")
    for name in "abcdefgh":
        (folder / f"{name}.txt").write_text("abcdefghijklmnop" * 40)
    out = tmp_path_factory.mktemp("data") / "repeated"
    prepare_dataset([folder], out, PrepareSettings(split={"valid": 0.3}))
    return out


@pytest.mark.parametrize(("lr", "num_ranks"), [(1e-8, 2), (1e-2, 1)])
def test_a_run_says_whether_it_learns_from_the_context(
    ranks: RankGroups, repeated: Path, tmp_path: Path, lr: float, num_ranks: int
) -> None:
    settings = (
        "training.num_steps=100",
        "training.log_interval_steps=10",
        "training.checkpoint_interval_steps=100",
        "evaluation={interval_steps: 40, max_tokens: 500}",
    )
    job = tiny_job(repeated, tmp_path, f"optimizer.lr={lr}", *settings)
    assert ranks(num_ranks).run(train_checking_early, job) == [0] * num_ranks
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "learning | unigram entropy of the data 2.78" in log
    learns = lr == 1e-2
    assert log.count("learning | WARNING: after ") == (0 if learns else 1)
    assert ("optimizer.warmup_steps is 4" in log) != learns
    scores = [line["valid/loss"] for line in metrics(tmp_path) if "valid/loss" in line]
    evaluations = [line for line in log.splitlines() if "evaluation at step" in line]
    assert len(scores) == len(evaluations) == 3
    assert "best so far" not in evaluations[0]
    if learns:
        assert f"best so far, by {scores[0] - scores[1]:.2g}" in evaluations[1]


# The unigram entropy of a corpus, or of a sample of it.


documents = st.lists(st.integers(0, 6), min_size=1, max_size=9)
corpora = st.lists(st.lists(documents, min_size=1, max_size=3), min_size=1, max_size=4)


@examples(100)
@given(first=corpora, second=corpora, share=st.floats(0.1, 0.9))
def test_the_entropy_is_that_of_the_frequencies_of_all_corpora_by_their_shares(
    first: list[list[list[int]]], second: list[list[list[int]]], share: float
) -> None:
    frequency: Counter[int] = Counter()
    sources = [TextSource(first), TextSource(second)]
    for source, weight in zip(sources, (share, 1 - share), strict=True):
        tokens = [token for document in source.documents for token in document]
        for token in tokens:
            frequency[token] += weight / len(tokens)  # type: ignore[assignment]
    expected = -sum(p * log(p) for p in frequency.values())
    assert unigram_entropy(sources, [share, 1 - share], vocab_size=7) == pytest.approx(expected)


def test_a_large_source_is_sampled_at_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    source, reads = random_corpus([[50]] * 400, vocab_size=5, seed=1), []
    read = LaneCursor.read

    def record(*arguments: Any) -> Any:
        reads.append(arguments[-2:])
        return read(*arguments)

    monkeypatch.setattr(LaneCursor, "read", record)
    whole = unigram_entropy([source], [1.0], vocab_size=5)
    assert reads == [(0, 20_000)]
    reads.clear()
    monkeypatch.setattr(diagnostics, "SAMPLE_TOKENS", 3200)
    assert unigram_entropy([source], [1.0], vocab_size=5) == pytest.approx(whole, rel=0.01)
    assert [stop - start for start, stop in reads] == [100] * 32
    assert (reads[0][0], reads[-1][1]) == (0, 20_000)
    assert max(b[0] - a[0] for a, b in pairwise(reads)) < 700
