"""`txl eval --watch RUN`: a process that scores the checkpoints of a run while training continues.

    training    saves a checkpoint of a step whose evaluation is due (`scores.py`)
    `watch`     scores it, writes its file in RUN/evaluations, and lets BEST point to the best one
    training    finds the file at its next save, and writes the score to metrics.jsonl

The run may train, with `evaluation.split: null`, or have ended. Checkpoints are scored in the order
of their steps, in which metrics have to be logged; two processes would only do the same work twice.
The sums of finished batches are kept in RUN/evaluations, so that the next process does not score
them again.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.system.files import is_locked
from data_pipeline.system.workers import Workers
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import CheckpointManifest, load_checkpoint_manifest
from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError, TxlError
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_spec
from txl_dist.evaluation.spec import EvaluationSettings, EvaluationSpec
from txl_dist.training.data import DEFAULT_SPLIT, EvaluatedSplit, TrainingData
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.scores import FOLDER, ScoreTable, StepScore, due_in

POLL_SECONDS = 0.5
"""Between two looks at the files of the run."""


def watch(
    run: Path,
    workers: Workers,
    *,
    split: str = DEFAULT_SPLIT,
    num_threads: int,
    note: Callable[[str], None],
) -> int:
    """Score the checkpoints of a run until it has ended and none waits; returns how many.

    The run is alive while a process holds its lock. `split`: what is scored if the config of
    the run names none. A checkpoint that cannot be scored is noted with the reason, and tried again
    by the next start of the run. Raises ConfigError if `run` cannot be watched.
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
    num_scored = 0
    scorer = _CheckpointScorer(directory.checkpoints, data.evaluation, config, workers, num_threads)
    table = ScoreTable(directory.checkpoints, due_in(config))
    while True:
        is_over = not is_locked(run / "lock")  # before the list: the last save is in it
        table.refresh()
        table.mark_best()
        if waiting := table.waiting():
            if (score := scorer.score(waiting[0])) is not None:
                table.add(score)
                num_scored += score.nats is not None
                note(f"evaluation at step {score.step} | {score}")
        elif not is_over:
            time.sleep(POLL_SECONDS)
        else:
            with suppress(ConfigError), directory.locked():  # else a new start writes them
                table.write_metrics(directory.metrics)
            return num_scored


@dataclass(frozen=True, slots=True)
class _CheckpointScorer:
    """Scores checkpoints as the ranks would have done when they wrote them."""

    checkpoints: CheckpointDirectory
    split: EvaluatedSplit
    config: RunConfig
    workers: Workers
    num_threads: int
    """May change the last bit of a matrix product."""

    def score(self, step: int) -> StepScore | None:
        """The score of a step; None if its checkpoint was removed or superseded meanwhile."""
        path = self.checkpoints.at(step)
        score = StepScore(
            step=step,
            split=self.split.name,
            max_tokens=self.config.evaluation.max_tokens,
            data_digest=self.split.corpus.manifest.digest,
            nats=None,
        )
        try:
            manifest = load_checkpoint_manifest(path)
            facts = {"tokens": manifest.state["tokens"], "save_id": manifest.save_id}
            spec, folder = self._spec(path, manifest), self.checkpoints.run / FOLDER
            planned = plan_spec(spec, folder, resume=True, allow_short_split=True)
            evaluate_on_workers([planned], self.workers)
            if load_checkpoint_manifest(path).save_id != manifest.save_id:
                return None
            return score.model_copy(update=facts).with_sums(planned.sums)
        except TxlError as error:
            if not path.exists():
                return None
            return score.model_copy(update={"reason": str(error)})

    def _spec(self, path: Path, manifest: CheckpointManifest) -> EvaluationSpec:
        model, run = manifest.architecture, manifest.run
        settings = EvaluationSettings(
            split=self.split.name,
            mode="exact",
            tgt_len=manifest.segment_len,
            mem_len=model.tokens_kept,
            clamp_len=model.clamp_len,
            same_length=model.same_length,
            reset=run["data.reset"],
            precision=run["precision"],
            max_tokens=self.config.evaluation.max_tokens,
        )
        return EvaluationSpec(
            checkpoint=path,
            data=self.split.corpus.directory,
            settings=settings,
            batch_chunks=self.config.evaluation.batch_chunks,
            num_ranks=manifest.num_ranks,
            num_threads=self.num_threads,
        )
