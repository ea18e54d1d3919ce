"""Step lines and metrics, and what the log says of the data: equal on any number of ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.prepared import prepared
from tests.support.training_runs import NO_EVALUATION, TINY, losses, metrics, tiny_spec, train
from txl_dist.config.config_file import load_run_config
from txl_dist.errors import ConfigError, DataError
from txl_dist.events import EventLog
from txl_dist.runtime.process import Span
from txl_dist.training.data import TrainingData
from txl_dist.training.report import Report, step_line
from txl_dist.training.state import LastUpdate, TrainState

VALUES = {
    "loss": 3.41234,
    "perplexity": 30.3,
    "bits_per_byte": 2.03,
    "lr": 1e-3,
    "gradient_norm": 0.5,
    "tokens_per_second": 1_234_567.0,
    "mfu": 0.55,
    "memory_valid": 1.0,
    "data_wait": 0.0,
}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 13 short documents."""
    text = "".join(f"{'ab' * (n % 5 + 1)}{n}\n" for n in range(13))
    return prepared(tmp_path_factory.mktemp("data") / "short", text, format="lines")


def test_80_columns_show_the_loss_the_speed_and_the_time_left() -> None:
    line = step_line(123456, {**VALUES, "seconds_left": 360_000})
    assert line[:75].startswith(
        "step 123456 | loss 3.4123 | ppl 30.30 | tok/s 1,234,567 | eta 100:00:00"
    )


def test_mem_valid_is_the_share_of_all_ranks_lanes_and_the_mfu_is_at_most_1(
    ranks: RankGroups, short: Path, tmp_path: Path
) -> None:
    valid = []
    for num_ranks in (1, 2):
        run = tmp_path / str(num_ranks)
        spec = tiny_spec(short, run, NO_EVALUATION)
        assert ranks(num_ranks).run(train, spec) == [0] * num_ranks
        valid.append([line["memory_valid"] for line in metrics(run)])
    assert valid[0] == valid[1]
    assert 0 < max(valid[0]) < 1
    peaks = [line["peak_flops"] for line in metrics(run)]
    assert peaks == sorted(peaks)
    assert all(0 < line["mfu"] <= 1 for line in metrics(run))


def test_a_step_without_a_target_has_no_line_and_no_effect(
    ranks: RankGroups, short: Path, tmp_path: Path
) -> None:
    """Segments of one token: the last of every epoch has nothing to predict."""
    spec = tiny_spec(short, tmp_path, NO_EVALUATION, "data.tgt_len=1", "training.num_steps=50")
    assert ranks(2).run(train, spec) == [0, 0]
    reported = losses(tmp_path)
    (lane_tokens,) = {step for step in range(2, 31) if step not in reported}
    assert set(range(1, 51)) - reported.keys() == {lane_tokens, 2 * lane_tokens}


def test_a_segment_as_long_as_a_lane_is_the_longest_that_trains(
    ranks: RankGroups, short: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(short, tmp_path, NO_EVALUATION, "data.tgt_len=1000")
    with pytest.raises(ConfigError, match="longer than a lane") as caught:
        TrainingData.open(spec.config, num_ranks=1)
    longest = str(caught.value).partition("at most ")[2].partition(",")[0]
    settings = (NO_EVALUATION, f"data.tgt_len={longest}", "training.num_steps=4")
    assert ranks(2).run(train, tiny_spec(short, tmp_path, *settings)) == [0, 0]


def test_the_log_says_what_is_probably_not_meant(
    ranks: RankGroups, short: Path, tmp_path: Path
) -> None:
    settings = (NO_EVALUATION, "optimizer.lr=0.05", "training.num_steps=4")
    assert ranks(1).run(train, tiny_spec(short, tmp_path, *settings)) == [0]
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "settings | WARNING: optimizer.lr=0.05 with optimizer.name=adamw" in log


# --- speed and time left, by a simulated clock ----------------------------------------------------


class Clock:
    """A report of a run of 601 steps of 15 tokens, and the seconds that it measures."""

    num_steps, unfinished_seconds = 1, 0.0

    def __init__(self, folder: Path) -> None:
        self.spent = dict.fromkeys(Span, 0.0)
        self.seconds = self.spent.copy
        config = load_run_config(
            TINY, ["data.path=none", "directory=none", "training.num_steps=601"]
        )
        events, self.step = EventLog(folder / "events.jsonl", lambda: 1), 0
        activity: Any = self
        self.report = Report(Mock(), events, activity, config, flops_per_token=100, peak_flops=3000)

    def train(self, *is_update: bool, evaluation_seconds: float = 0.0) -> dict[str, float]:
        """Steps of a second, some of which are excluded and take none; the line after them."""
        self.spent[Span.EVALUATION] += evaluation_seconds
        state = TrainState()
        for is_computed in is_update:
            self.step += 1
            self.report.segment(self.step)
            self.spent[Span.FORWARD] += is_computed
            last = LastUpdate(step=self.step, gradient_norm=1.0, memory_valid=1.0)
            count = sum(is_update)
            state = TrainState(
                step=self.step, unreported=(1.0, 15 * count, 15), unreported_steps=count,
                last_update=last,
            )  # fmt: skip
            result: Any = SimpleNamespace(is_update=is_computed, event=None)
            self.report.step(state, result)
        values: dict[str, float] = {}
        self.report.line(state, values)
        return values


def test_the_time_left_does_not_expect_the_evaluation_before_the_first_step_again(
    tmp_path: Path,
) -> None:
    clock = Clock(tmp_path)
    assert clock.train(True, evaluation_seconds=100)["seconds_left"] == pytest.approx(600)
    # Half of the time since was evaluation: 599 seconds of steps are two thirds of the rest.
    assert clock.train(True, evaluation_seconds=1)["seconds_left"] == pytest.approx(599 * 1.5)


def test_a_rate_above_the_measured_peak_is_the_peak(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    assert clock.train(True)["mfu"] == pytest.approx(0.5)
    clock.spent[Span.FORWARD] -= 0.75  # the next step takes a quarter of a second
    values = clock.train(True)
    assert (values["mfu"], values["peak_flops"]) == pytest.approx((1.0, 6000))
    assert clock.train(True)["mfu"] == pytest.approx(0.25)


def test_steps_that_a_rollback_excludes_do_not_count_as_speed(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for steps in ((True, True), (True, False, False, True)):
        assert clock.train(*steps)["tokens_per_second"] == pytest.approx(15)


# --- the split that is scored ---------------------------------------------------------------------


DEFAULT = "evaluation={interval_steps: 8, max_tokens: 50}"


@pytest.fixture(scope="module")
def train_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset without a valid split."""
    text = "the quick brown fox jumps over the lazy dog\n" * 50
    return prepared(tmp_path_factory.mktemp("data") / "train-only", text)


@pytest.fixture(scope="module")
def chapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 40 documents in one block."""
    text = "".join(f"chapter {n} {'la ' * (n % 7)}\n" for n in range(40))
    return prepared(tmp_path_factory.mktemp("data") / "chapters", text, format="lines")


def _log(run: Path) -> str:
    return (run / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("data", "setting", "scored", "text"),
    [
        ("dataset", DEFAULT, [8, 16, 20], "tokens of split 'valid' of {} | every 8 steps and at"),
        ("train_only", DEFAULT, [], "no evaluation, no score and no BEST checkpoint: no data of"),
        ("dataset", NO_EVALUATION, [], "evaluation | none, because evaluation.split=null"),
    ],
)
def test_the_valid_split_is_scored_if_there_is_one_and_the_log_says_so(
    ranks: RankGroups, request: pytest.FixtureRequest, tmp_path: Path,
    data: str, setting: str, scored: list[int], text: str,
) -> None:  # fmt: skip
    path = request.getfixturevalue(data)
    assert ranks(1).run(train, tiny_spec(path, tmp_path, setting)) == [0]
    assert [line["step"] for line in metrics(tmp_path) if "valid/loss" in line] == scored
    assert (tmp_path / "BEST").exists() == bool(scored)
    assert text.format(path) in _log(tmp_path)
    assert ("--split valid=0.01" in _log(tmp_path)) == (data == "train_only"), "how to get one"


def test_a_split_that_no_corpus_has_is_refused(train_only: Path, tmp_path: Path) -> None:
    spec = tiny_spec(train_only, tmp_path, "evaluation.split=valid")
    with pytest.raises(DataError, match="has no split 'valid'; it has train"):
        TrainingData.open(spec.config, num_ranks=1)


@pytest.mark.parametrize(("reset", "in_order"), [("stream", True), ("document", False)])
def test_a_memory_that_continues_is_that_of_the_document_before(
    ranks: RankGroups, chapters: Path, tmp_path: Path, reset: str, in_order: bool
) -> None:
    settings = (NO_EVALUATION, f"data.reset={reset}", "data.num_lanes=2", "training.num_steps=9")
    for shuffle in ("blocks", "none"):
        spec = tiny_spec(chapters, tmp_path / shuffle, *settings, f"data.shuffle={shuffle}")
        assert ranks(1).run(train, spec) == [0]
    # One block: shuffled blocks differ from the order of the corpus only inside it.
    assert (losses(tmp_path / "blocks") == losses(tmp_path / "none")) == in_order


def test_a_memory_that_continues_over_documents_shuffled_before_is_a_warning(
    ranks: RankGroups, tmp_path: Path
) -> None:
    text = "".join(f"line {n}\n" for n in range(20))
    data = prepared(tmp_path / "data", text, format="lines", shuffle=1)
    for reset in ("document", "stream"):
        settings = (NO_EVALUATION, f"data.reset={reset}", "training.num_steps=4")
        assert ranks(1).run(train, tiny_spec(data, tmp_path / reset, *settings)) == [0]
        warns = f"{data} was prepared with --shuffle" in _log(tmp_path / reset)
        assert warns == (reset == "stream")
