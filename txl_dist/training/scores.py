"""The scores of a run: one file for each evaluated step, and what an evaluation is waiting for.

    RUN/evaluations/step-NNNNNNNN.json   the score of a step, or why it has none

An evaluation is due at the multiples of `evaluation.interval_steps` and at the last step:

    checkpoint  file  state    what happens
    yes         no    waiting  the ranks score it before the next step, also after a resume
    any         yes   scored   rank 0 writes it to metrics.jsonl once; the best one is BEST

The ranks of a run and `txl eval --watch` (`score_checkpoints.py`) write these files. Nothing else
is stored about evaluations, except the best score in each checkpoint: a run that continues from a
copy on an empty disk knows it.
"""

import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from data_pipeline.system.files import write_file
from data_pipeline.system.strict import StrictModel, first_problem
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import Count, Sha256, load_checkpoint_manifest
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.scores import FOLDER, LossSums
from txl_dist.tracking.journal import MetricsJournal, read_metrics

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

    def with_sums(self, sums: LossSums) -> "StepScore":
        """The same with the sums of an evaluation, if they are finite."""
        reason = ""
        if not math.isfinite(sums.nats):
            reason = (
                f"the loss of split {self.split} after step {self.step} is {sums.nats}: earlier "
                "updates were too large, and the weights are unusable"
            )
        changes = {
            "nats": None if reason else sums.nats,
            "tokens_scored": int(sums.num_tokens),
            "bytes_scored": max(0, int(sums.num_bytes)),
            "reason": reason,
        }
        return self.model_copy(update=changes)

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
        if other is None or self._text != other._text:
            return 0.0
        gain = other.sums.nats_per_token - self.sums.nats_per_token
        return gain if gain > 0 else None

    @property
    def _text(self) -> tuple[str, int | None, str | None]:
        return self.split, self.max_tokens, self.data_digest


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
        """The best score up to now."""
        best = None
        for _, score in sorted(self._by_step.items()):
            best = score if score.gain_over(best) is not None else best
        return best

    @property
    def best_step(self) -> int | None:
        """The step of the best score."""
        best = self.best
        return best.step if best else None

    def get(self, step: int) -> StepScore | None:
        """The score of a step, if it has one."""
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

        A file that cannot be written is a warning: the next start evaluates the step again.
        """
        path = self._path(score.step)
        try:
            self._folder.mkdir(exist_ok=True)
            write_file(path, score.model_dump_json(indent=1).encode() + b"\n")
            self._from_files.add(score.step)
        except OSError as error:
            log.warning("%s cannot be written (%s)", path, error.strerror)
        return self._take(score)

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
        step = self.best_step
        if step is None or step not in self._checkpoints.steps():
            return
        if self._checkpoints.pointer("BEST") != step:
            self._checkpoints.set_pointer("BEST", step)


def due_in(config: RunConfig) -> Callable[[int], bool]:
    """Whether the evaluation of a step is due in a run whose length is resolved.

    A function of the step only, so a resumed run has the same evaluations.
    """
    interval_steps, num_steps = config.evaluation.interval_steps, config.num_steps
    # The weights of an earlier run have a score that is worth knowing.
    first = 0 if config.init_from is not None else 1
    return lambda step: step >= first and (step % interval_steps == 0 or step == num_steps)
