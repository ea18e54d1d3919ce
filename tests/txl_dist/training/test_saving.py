"""A run saves before it evaluates, in the background, only finite numbers, into its own directory.

`test_run_saver.py` has the saver alone.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import (
    NO_EVALUATION,
    ZERO,
    losses,
    metrics,
    opened_trainer,
    refusal,
    tiny_spec,
    train,
)
from txl_dist.checkpoint.checkpoints import Checkpoints, Save
from txl_dist.checkpoint.directory import CheckpointDirectory, resolve_checkpoint
from txl_dist.checkpoint.tensors import Snapshot, verify_checkpoint
from txl_dist.errors import TxlError
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.training.loop import Trainer
from txl_dist.training.report import Observer
from txl_dist.training.scores import StepScore
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState, load_state

SETTINGS = ("evaluation.max_tokens=300", "training.checkpoint_interval_steps=5")
CLOCK = (
    "time", "tokens_per_second", "mfu", "peak_flops", "data_wait", "save_wait", "evaluation_wait",
    "goodput", "seconds_left",
)  # fmt: skip
"""Metrics that depend on the machine and differ between any two runs."""
RESUMES = ("restarts", "lost_steps")
"""Metrics that tell a resumed run from an uninterrupted one."""


def train_changed(
    world: World, spec: TrainSpec, change: Callable[..., None], *args: Any
) -> tuple[int, str]:
    """Run a spec after `change(trainer, *args)`; exit code and message of what ended it."""
    with opened_trainer(world, spec) as trainer:
        change(trainer, *args)
        try:
            trainer.run()
        except TxlError as error:
            return error.exit_code, str(error)
    return 0, ""


def computed(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without those metrics."""
    left_out = (*CLOCK, *RESUMES)
    return [{k: v for k, v in line.items() if k not in left_out} for line in metrics(run)]


def state_at(run: Path, step: int) -> TrainState:
    path = CheckpointDirectory(run).at(step)
    return load_state(path, verify_checkpoint(path))


# --- a stop in the evaluation -------------------------------------------------------------------


class StopInEvaluation:
    """True from the `polls`-th time it is read while the evaluation of `step` is pending."""

    def __init__(self, trainer: Trainer, step: int, polls: int) -> None:
        self.trainer, self.step, self.polls = trainer, step, polls

    def __bool__(self) -> bool:
        state = self.trainer.state
        if state.step == self.step and self.trainer.evaluation_is_pending:
            self.polls -= 1
        return self.polls <= 0


def stop_in_evaluation(trainer: Trainer, step: int, only_rank: int | None) -> None:
    if only_rank in (None, trainer.step.world.rank):
        trainer.stop = StopInEvaluation(trainer, step, polls=3)  # type: ignore[assignment]


@pytest.mark.parametrize("only_rank", [None, 1])
@pytest.mark.parametrize("step", [pytest.param(10, marks=pytest.mark.slow), 14, 20])
def test_a_stop_in_the_evaluation_saves_first_and_the_resumed_run_equals_an_uninterrupted_one(
    ranks: RankGroups, dataset: Path, tmp_path: Path, step: int, only_rank: int | None
) -> None:
    settings = (*SETTINGS, f"evaluation.interval_steps={step}", "evaluation.batch_chunks=1")
    straight = tiny_spec(dataset, tmp_path / "straight", *settings)
    assert ranks(2).run(train, straight) == [0, 0]

    spec = tiny_spec(dataset, tmp_path / "stopped", *settings)
    ends = ranks(2).run(train_changed, spec, stop_in_evaluation, step, only_rank)
    assert [code for code, _ in ends] == [75, 75]
    assert f"stopped on request after step {step}" in ends[0][1]
    assert CheckpointDirectory(spec.run_path).steps()[-1] == step
    assert not any("valid/loss" in line for line in metrics(spec.run_path))

    assert ranks(2).run(train, spec) == [0, 0]
    assert computed(spec.run_path) == computed(straight.run_path)
    assert state_at(spec.run_path, 20) == state_at(straight.run_path, 20)
    best = (straight.run_path / "BEST").read_text()
    assert (spec.run_path / "BEST").read_text() == best


class CopyAtScore(Observer):
    """Copies the run as a kill between writing the score and its line in the metrics leaves it."""

    def __init__(self, trainer: Trainer, copy: Path) -> None:
        self.trainer, self.copy = trainer, copy

    def score(self, score: StepScore, gain: float | None) -> None:
        if score.step == 10:
            self.trainer.saver.wait()  # one rank: not collective
            shutil.copytree(Path(self.trainer.config.directory), self.copy)


def keep_copy_before_line(trainer: Trainer, copy: Path) -> None:
    trainer.observers.insert(0, CopyAtScore(trainer, copy))


def test_a_kill_between_a_score_and_its_line_writes_it_once(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, "evaluation.interval_steps=10")
    straight = tiny_spec(dataset, tmp_path / "straight", *settings)
    assert ranks(1).run(train_changed, straight, keep_copy_before_line, tmp_path / "killed") == [
        (0, "")
    ]
    spec = tiny_spec(dataset, tmp_path / "killed", *settings)
    assert "valid/loss" not in computed(spec.run_path)[-1]
    assert ranks(1).run(train, spec) == [0]
    assert computed(spec.run_path) == computed(straight.run_path)


def test_a_pending_evaluation_is_dropped_by_a_run_that_does_not_evaluate(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(dataset, tmp_path, *SETTINGS, "evaluation.batch_chunks=1")
    ends = ranks(1).run(train_changed, spec, stop_in_evaluation, 10, None)
    assert ends[0][0] == 75
    assert ranks(1).run(train, tiny_spec(dataset, tmp_path, *SETTINGS, NO_EVALUATION)) == [0]
    assert not any("valid/loss" in line for line in metrics(tmp_path))


# --- saves in the background ---------------------------------------------------------------------

SAVES = (NO_EVALUATION, "training.checkpoint_interval_steps=5", "training.keep_checkpoints=9")


def train_with_slow_disk(world: World, spec: TrainSpec, rank: int) -> tuple[int, str]:
    """A save of `rank` takes until 3 more steps have been trained, except at the end."""
    write_part = Checkpoints.write_part
    trainers: list[Trainer] = []

    def write_late(checkpoints: Checkpoints, save: Save, snapshot: Snapshot) -> None:
        deadline = time.monotonic() + 60
        while save.rank == rank and trainers[0].state.step < min(20, save.state["step"] + 3):
            assert time.monotonic() < deadline, "the loop waits for the save"
            time.sleep(0.001)
        write_part(checkpoints, save, snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "write_part", write_late)
        return train_changed(world, spec, trainers.append)


@pytest.mark.parametrize("stage", ["1", pytest.param("3-all-spread", marks=pytest.mark.slow)])
def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_state_of_its_step(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str
) -> None:
    straight = tiny_spec(dataset, tmp_path / "straight", *SAVES, *ZERO[stage])
    assert ranks(2).run(train, straight) == [0, 0]
    slow = tiny_spec(dataset, tmp_path / "slow", *SAVES, *ZERO[stage])
    assert ranks(2).run(train_with_slow_disk, slow, 1) == [(0, "")] * 2
    assert losses(slow.run_path) == losses(straight.run_path)
    for step in (5, 10, 15, 20):
        expected, actual = (
            verify_checkpoint(CheckpointDirectory(spec.run_path).at(step)).files
            for spec in (straight, slow)
        )
        assert actual == expected, "the same bytes"


@pytest.mark.slow
def test_a_checkpoint_is_saved_when_minutes_have_passed_on_rank_0(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SAVES, "training.checkpoint_interval_steps=99", "training.num_steps=6")
    minutes = "training.checkpoint_interval_minutes=1e-6"
    spec = tiny_spec(dataset, tmp_path, *settings, minutes)
    assert ranks(2).run(train_changed, spec, unchanged) == [(0, "")] * 2
    assert CheckpointDirectory(tmp_path).steps() == [1, 2, 3, 4, 5, 6]


# --- numbers that are not finite ----------------------------------------------------------------


def poison_before_save(trainer: Trainer, step: int, rank: int, kind: str) -> None:
    """Make one number of one rank not finite, after the finite loss of `step`."""
    save = trainer.saver.save

    def poisoned(state: TrainState) -> None:
        if state.step == step and trainer.step.world.rank == rank:
            if kind == "memory":
                trainer.step.memories[0][0].layers[1][0, -1, -1] = float("inf")
            else:
                fragment = next(iter(trainer.step.engine.fragments()))
                tensor = fragment.master if kind == "weights" else fragment.states["exp_avg"]
                tensor.view(-1)[-1] = float("nan")
        save(state)

    trainer.saver.save = poisoned  # type: ignore[method-assign]


@pytest.mark.fault_row(28)
@pytest.mark.parametrize(
    ("stage", "kind"),
    [("0", "weights"), ("1", "optimizer"), ("2", "memory"), ("3-all-spread", "weights")],
)
def test_a_non_finite_number_on_one_rank_prevents_the_save_on_all(
    ranks: RankGroups, dataset: Path, tmp_path: Path, stage: str, kind: str
) -> None:
    settings = (NO_EVALUATION, *SETTINGS, "training.keep_checkpoints=1", *ZERO[stage])
    spec = tiny_spec(dataset, tmp_path, *settings)
    ends = ranks(2).run(train_changed, spec, poison_before_save, 10, 1, kind)
    assert [code for code, _ in ends] == [5, 5]
    for _, message in ends:
        assert f"after step 10 not all numbers are finite in {kind}" in message
        assert "(rank 1)" in message
        assert f"--resume {CheckpointDirectory(tmp_path).at(5)}" in message
    assert CheckpointDirectory(tmp_path).steps() == [5]
    assert resolve_checkpoint(tmp_path / "LATEST") == CheckpointDirectory(tmp_path).at(5)


@pytest.mark.fault_row(28)
@pytest.mark.parametrize(("lr", "steps"), [("1e39", [5]), ("1e36", [5, 6])])
def test_a_learning_rate_that_overflows_leaves_the_last_good_checkpoint(
    ranks: RankGroups, dataset: Path, tmp_path: Path, lr: str, steps: list[int]
) -> None:
    """The first loss is finite. Then the weights are not finite; or they are, but their loss."""
    settings = (NO_EVALUATION, "training.keep_checkpoints=1", "optimizer.schedule=constant")
    first = (*settings, "training.num_steps=5")
    assert ranks(2).run(train, tiny_spec(dataset, tmp_path, *first)) == [0, 0]

    further = (*settings, "training.checkpoint_interval_steps=1")
    allowed = ("training.num_steps", "optimizer.lr", "optimizer.schedule")
    hot = tiny_spec(dataset, tmp_path, *further, f"optimizer.lr={lr}", allow_change=allowed)
    assert ranks(2).run(train, hot) == [5, 5]
    assert f"--resume {CheckpointDirectory(tmp_path).at(5)}" in refusal(tmp_path)
    assert CheckpointDirectory(tmp_path).steps() == steps
    if steps == [5]:
        cool = tiny_spec(dataset, tmp_path, *further, allow_change=allowed)
        assert ranks(2).run(train, cool) == [0, 0]


def unchanged(trainer: Trainer) -> None:
    """No change."""


def nan_in_evaluation(trainer: Trainer, step: int) -> None:
    evaluate = trainer.evaluate
    assert evaluate is not None

    def poisoned(state: TrainState, stop: StopRequest) -> StepScore | None:
        if trainer.state.step == step and trainer.step.world.rank == 1:
            with trainer.step.engine.whole_model() as model:
                next(model.parameters()).data.view(-1)[:] = float("nan")
        return evaluate(state, stop)

    trainer.evaluate = poisoned


def test_a_nan_in_the_evaluation_is_a_divergence_that_names_split_and_step(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, "evaluation.interval_steps=5", "training.keep_checkpoints=1")
    spec = tiny_spec(dataset, tmp_path, *settings, "deepspeed.zero_stage=0")
    ends = ranks(2).run(train_changed, spec, nan_in_evaluation, 10)
    assert [code for code, _ in ends] == [5, 5]
    for _, message in ends:
        assert "the loss of split valid after step 10 is nan" in message
        assert f"--resume {CheckpointDirectory(tmp_path).at(5)}" in message
    assert CheckpointDirectory(tmp_path).steps() == [5, 10]


# --- the run directory --------------------------------------------------------------------------


def remove_run_directory(trainer: Trainer, step: int) -> None:
    confirm = trainer.saver.confirm

    def removing() -> None:
        if trainer.state.step == step:
            trainer.saver.wait()
        if trainer.state.step == step and trainer.step.world.is_rank_zero:
            shutil.rmtree(trainer.config.directory)
        confirm()

    trainer.saver.confirm = removing  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [7, 19])
def test_a_run_directory_removed_during_the_run_is_an_error(
    ranks: RankGroups, dataset: Path, tmp_path: Path, step: int
) -> None:
    spec = tiny_spec(dataset, tmp_path / "run", NO_EVALUATION, *SETTINGS)
    ends = ranks(2).run(train_changed, spec, remove_run_directory, step)
    assert [code for code, _ in ends] == [4, 4]
    assert "is gone" in ends[1][1]
    assert not (tmp_path / "run").exists()


def test_best_is_updated_when_a_run_resumes_from_an_older_checkpoint(
    ranks: RankGroups, dataset: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, "evaluation.interval_steps=5", "training.keep_checkpoints=9")
    spec = tiny_spec(dataset, tmp_path, *settings)
    assert ranks(1).run(train, spec) == [0]
    directory = CheckpointDirectory(tmp_path)
    assert resolve_checkpoint(tmp_path / "BEST") != directory.at(5)
    for step in directory.steps()[1:]:
        (directory.at(step) / "manifest.json").write_text("damaged")
    ends = ranks(1).run(train_changed, spec, stop_immediately)
    assert ends[0][0] == 75
    assert resolve_checkpoint(tmp_path / "BEST") == directory.at(5)


def stop_immediately(trainer: Trainer) -> None:
    trainer.stop = True  # type: ignore[assignment]
