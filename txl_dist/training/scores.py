"""The scores of a run: one file for each evaluated step.

    RUN/evaluations/step-NNNNNNNN.json   the score of a step, or why it has none

An evaluation is due at the multiples of `evaluation.interval_steps` and at the last step:

    checkpoint  file  state    what happens
    yes         no    waiting  the ranks score it before the next step, also after a resume
    any         yes   scored   rank 0 writes it to metrics.jsonl once; the best one is BEST

The ranks of a run write these files, or `watch` (`txl eval --watch RUN`) while training continues,
with `evaluation.split: null`, or after it. The run finds a new file at its next save. Nothing else
is stored about evaluations, except the best score in each checkpoint: a run that continues from a
copy on an empty disk knows it.
"""

import logging
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from data_pipeline.system.files import write_file
from data_pipeline.system.strict import StrictModel, first_problem
from data_pipeline.system.workers import Workers
from txl_dist.checkpoint.directory import CheckpointDirectory, reading
from txl_dist.checkpoint.manifest import Count, Sha256, load_checkpoint_manifest
from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.evaluation.scores import FOLDER, LossSums
from txl_dist.tracking.journal import MetricsJournal, read_metrics
from txl_dist.training.data import DEFAULT_SPLIT, EvaluatedSplit, TrainingData
from txl_dist.training.spec import RunDirectory, live_runs

POLL_SECONDS = 0.5
"""Between two looks of `watch` at the files of the run."""
_NAME = re.compile(r"step-(\d{8,})\.json")

log = logging.getLogger(__name__)


class StepScore(StrictModel):
    """The score of a split after a step."""

    step: Count
    tokens: Count = 0
    """Targets that the run had trained on."""
    split: str
    max_tokens: Count | None
    data_digest: Sha256 | None = None
    """Digest of the dataset that was scored. Losses on different text are not compared."""
    nats: float | None
    """None: there is no score, for the `reason`."""
    tokens_scored: Count = 0
    bytes_scored: Count = 0
    reason: str = ""
    save_id: str | None = None
    """The save that was scored; None: the weights of the ranks."""

    @classmethod
    def of(cls, sums: LossSums, *, step: int, split: str, **facts: Any) -> Self:
        """The score with the sums of an evaluation, or the reason why they are none."""
        reason = ""
        if not math.isfinite(sums.nats):
            reason = (
                f"the loss of split {split} after step {step} is {sums.nats}: earlier "
                "updates were too large, and the weights are unusable"
            )
        return cls(
            step=step,
            split=split,
            nats=None if reason else sums.nats,
            tokens_scored=int(sums.num_tokens),
            bytes_scored=max(0, int(sums.num_bytes)),
            reason=reason,
            **facts,
        )

    def __str__(self) -> str:
        return self.reason or f"loss {self.nats_per_token:.4f}"

    def metrics(self) -> dict[str, float]:
        """The line for metrics.jsonl; the split begins the names."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "time": time.time(),
            f"{self.split}/tokens_scored": self.tokens_scored,
            **{f"{self.split}/{name}": value for name, value in self.sums.metrics.items()},
        }

    @property
    def nats_per_token(self) -> float | None:
        """None if there is no score."""
        return None if self.nats is None else self.sums.nats_per_token

    @property
    def sums(self) -> LossSums:
        assert self.nats is not None
        return LossSums(self.nats, self.tokens_scored, self.bytes_scored)

    def gain_over(self, other: "StepScore | None") -> float | None:
        """Nats per token below `other`; 0 if that is of other text; None if it is not better."""
        if self.nats is None:
            return None
        text = self.split, self.max_tokens, self.data_digest
        if other is None or text != (other.split, other.max_tokens, other.data_digest):
            return 0.0
        gain = other.sums.nats_per_token - self.sums.nats_per_token
        return gain if gain > 0 else None


class ScoreTable:
    """The scores of a run directory, on rank 0 and in the process that scores its checkpoints."""

    def __init__(
        self,
        checkpoints: CheckpointDirectory,
        is_due: Callable[[int], bool],
        *,
        inherited: StepScore | None = None,
    ) -> None:
        """`is_due`: whether the evaluation of a step is due. `inherited`: the best score in the
        checkpoint from which the run resumes, whose file may be on another disk.
        """
        self._checkpoints, self._is_due = checkpoints, is_due
        self._folder = checkpoints.run / FOLDER
        self._by_step: dict[int, StepScore] = {}
        self._from_files: set[int] = set()
        """Steps whose files were read or written."""
        if inherited is not None:
            self._take(inherited)
        self.refresh()

    @property
    def best(self) -> StepScore | None:
        best = None
        for _, score in sorted(self._by_step.items()):
            best = score if score.gain_over(best) is not None else best
        return best

    @property
    def best_step(self) -> int | None:
        return self.best.step if self.best else None

    def get(self, step: int) -> StepScore | None:
        return self._by_step.get(step)

    def refresh(self) -> list[tuple[StepScore, float | None]]:
        """Read the files that are new; these scores with their gains, by ascending step.

        Forgets the scores whose files a rollback has removed.
        """
        steps = self._steps_with_file()
        self._forget(self._from_files - steps)
        new = [self._read(step) for step in sorted(steps - self._from_files)]
        return [(score, self._take(score)) for score in new if score is not None]

    def _steps_with_file(self) -> set[int]:
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        matches = (_NAME.fullmatch(path.name) for path in paths)
        return {int(match[1]) for match in matches if match}

    def _forget(self, steps: set[int]) -> None:
        self._by_step = {n: score for n, score in self._by_step.items() if n not in steps}
        self._from_files -= steps

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.json"

    def _read(self, step: int) -> StepScore | None:
        path = self._path(step)
        try:
            score = StepScore.model_validate_json(path.read_bytes())
            if not self._is_current(score):
                return None
            self._from_files.add(step)
            return score
        except FileNotFoundError:  # a rollback has removed it
            return None
        except (OSError, ValidationError) as error:
            self._from_files.add(step)  # one warning is enough
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            log.warning("%s cannot be read (%s): the step counts as not evaluated", path, problem)
            return None

    def _is_current(self, score: StepScore) -> bool:
        """Whether the checkpoint of its step, if there is one, is that which was scored."""
        path = self._checkpoints.at(score.step)
        if score.save_id is None or not path.exists():
            return True
        try:
            return load_checkpoint_manifest(path).save_id == score.save_id
        except CheckpointError:
            return True

    def _take(self, score: StepScore) -> float | None:
        gain = score.gain_over(self.best)
        self._by_step[score.step] = score
        return gain

    def add(self, score: StepScore) -> float | None:
        """Write the file of a score; its gain over the best one (`StepScore.gain_over`).

        A file that cannot be written is a warning: the next start evaluates the step again. Raises
        FencedError in a run that a newer attempt has replaced.
        """
        path = self._path(score.step)
        try:
            self._checkpoints.require_newest_attempt()
            self._folder.mkdir(exist_ok=True)
            write_file(path, score.model_dump_json(indent=1).encode() + b"\n")
            self._from_files.add(score.step)
        except OSError as error:
            log.warning("%s cannot be written (%s)", path, error.strerror)
        return self._take(score)

    @property
    def best_step_with_new_files(self) -> int | None:
        """`best_step`, with files that are new and stay new: `refresh` announces them."""
        table = ScoreTable(self._checkpoints, self._is_due)
        table._by_step = {**self._by_step, **table._by_step}
        return table.best_step

    def rewind(self, step: int) -> None:
        """Remove the scores after `step`, to which the run returns, and those without a number,
        which are tried again.

        Files that are new stay new, unless they are of later steps: `refresh` announces them.
        """
        known = {n for n, score in self._by_step.items() if n > step or score.nats is None}
        removed = known | {n for n in self._steps_with_file() if n > step}
        for number in removed:
            self._path(number).unlink(missing_ok=True)
        self._forget(removed)

    def waiting(self) -> list[int]:
        """Steps of checkpoints whose evaluation is due and not done, ascending."""
        steps = self._checkpoints.steps()
        return [step for step in steps if step not in self._by_step and self._is_due(step)]

    def write_metrics(self, path: Path) -> None:
        """Append the scores that the metrics in `path` lack."""
        if not path.exists():
            return
        written = {
            line["step"]
            for line in read_metrics(path)
            if any(name.endswith("/loss") for name in line)
        }
        scores = (self._by_step[step] for step in sorted(self._by_step.keys() - written))
        if missing := [score for score in scores if score.nats is not None]:
            with MetricsJournal(path) as journal:
                for score in missing:
                    journal.write(score.metrics())

    def mark_best(self) -> None:
        """Let BEST point to the checkpoint of the best score, if there is one."""
        step, checkpoints = self.best_step, self._checkpoints
        if step in checkpoints.steps() and checkpoints.pointer("BEST") != step:
            checkpoints.set_pointer("BEST", step)


def due_in(config: RunConfig) -> Callable[[int], bool]:
    """Whether the evaluation of a step is due in a run whose length is resolved.

    A function of the step only, so a resumed run has the same evaluations.
    """
    interval_steps, num_steps = config.evaluation.interval_steps, config.num_steps
    # The weights of an earlier run have a score that is worth knowing.
    first = 0 if config.init_from is not None else 1
    return lambda step: step >= first and (step % interval_steps == 0 or step == num_steps)


# --- txl eval --watch -----------------------------------------------------------------------------


def watch(
    run: Path,
    workers: Workers,
    *,
    split: str = DEFAULT_SPLIT,
    num_threads: int,
    note: Callable[[str], None],
) -> int:
    """Score the checkpoints of a run until it has ended and none waits; returns how many.

    In the order of their steps, in which metrics have to be logged. The run has not ended while
    its launcher restarts ranks. `split`: what is scored if the config of the run names none. A
    checkpoint that cannot be scored is noted with the reason, and tried again by the next start of
    the run. Raises ConfigError if `run` cannot be watched.
    """
    directory = RunDirectory(run)
    if not directory.config.is_file():
        raise ConfigError(f"{run} has no config.yaml, so it is no run directory: start the run")
    config = load_run_config(directory.config, [f"directory={run}"])
    if config.evaluation.split is None:
        named = config.evaluation.model_copy(update={"split": split})
        config = config.model_copy(update={"evaluation": named})
    data = TrainingData.open(config, num_ranks=1)
    if data.evaluation is None:
        raise ConfigError(
            f"the data of {run} has no split {DEFAULT_SPLIT!r} with tokens; set evaluation.split="
            f"NAME in {directory.config}"
        )
    num_scored, checkpoints = 0, directory.checkpoints
    table = ScoreTable(checkpoints, due_in(config))

    def next_steps() -> list[int]:
        table.refresh()
        table.mark_best()
        return table.waiting()

    while True:
        waiting, is_over = next_steps(), False
        if not waiting:
            is_over = not live_runs([run])
            waiting = next_steps()  # the last save is in it
        if waiting:
            path = checkpoints.at(waiting[0])
            score = _score(path, waiting[0], data.evaluation, config, workers, num_threads)
            if score is not None:
                table.add(score)
                num_scored += score.nats is not None
                note(f"evaluation at step {score.step} | {score}")
        elif not is_over:
            time.sleep(POLL_SECONDS)
        else:
            with suppress(ConfigError), directory.locked():  # else a new start writes them
                table.write_metrics(directory.metrics)
            return num_scored


def _score(
    path: Path, step: int, split: EvaluatedSplit, config: RunConfig, workers: Workers, threads: int
) -> StepScore | None:
    """Score a checkpoint as the ranks would have done when they wrote it.

    None if it was removed or superseded meanwhile. `threads` of torch may change the last bit.
    """
    from txl_dist.evaluation.distributed import evaluate_on_workers, plan_spec  # imports torch
    from txl_dist.evaluation.spec import evaluation_spec

    max_tokens = config.evaluation.max_tokens
    facts: dict[str, Any] = {
        "step": step,
        "split": split.name,
        "max_tokens": max_tokens,
        "data_digest": split.corpus.manifest.digest,
    }
    try:
        manifest = load_checkpoint_manifest(path)
        spec = evaluation_spec(
            path,
            split.corpus.directory,
            split=split.name,
            precision=manifest.run["precision"],
            batch=config.evaluation.batch_chunks,
            max_tokens=max_tokens,
        )
        spec = replace(spec, num_ranks=manifest.num_ranks, num_threads=threads)
        # Else a run that saves faster than this scores removes each checkpoint before its score.
        with reading(path):
            # The next process does not score the finished batches again.
            planned = plan_spec(spec, path.parents[1] / FOLDER, resume=True, allow_short_split=True)
            evaluate_on_workers([planned], workers)
        if load_checkpoint_manifest(path).save_id != manifest.save_id:
            return None
        facts |= {"tokens": manifest.state["tokens"], "save_id": manifest.save_id}
        return StepScore.of(planned.sums, **facts)
    except TxlError as error:
        return StepScore(**facts, nats=None, reason=str(error)) if path.exists() else None
