"""Evaluation on Ray: actors score the chunks of a split.

    plan_evaluation -> groups of chunks -> EvaluationWorker.score (actors) -> summarise

Each actor loads the model once. Groups of `batch_chunks` chunks go to whichever actor is idle. The
results are added in the order of the chunks, so the score does not depend on which actor was
faster, or on the number of actors.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from cluster.connection import ray_connection, uses_gpus
from data_pipeline.shards.shard_reader import open_split
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import TxlError
from txl_dist.evaluation.chunks import EvaluationChunk
from txl_dist.evaluation.evaluate import (
    EvaluationJob,
    EvaluationResult,
    plan_evaluation,
    summarise,
)
from txl_dist.evaluation.loss_sums import LossSums


class EvaluationWorker:
    """An actor: a model and a split, opened once.

    The methods return a TxlError instead of raising it, because Ray would wrap it in its own.
    """

    def __init__(self, job: EvaluationJob, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._job = job

    def open(self) -> TxlError | None:
        """Load the model and open the split."""
        try:
            self._scorer = self._job.open()
        except TxlError as error:
            return error
        return None

    def score(self, chunks: Sequence[EvaluationChunk]) -> list[LossSums] | TxlError:
        """The loss sums of each chunk, in order."""
        try:
            return list(self._scorer.scores(chunks))
        except TxlError as error:
            return error


def evaluate_on_ray(
    job: EvaluationJob,
    *,
    num_workers: int,
    address: str | None,
    on_progress: Callable[[int, int], None],
) -> EvaluationResult:
    """Score a split with `num_workers` actors. Raises the first TxlError of any actor."""
    model = find_model(job.checkpoint)
    source = open_split(job.data, job.settings.split)
    chunks = plan_evaluation(source, job.settings, n_layer=model.config.n_layer)
    num_cpus = os.cpu_count() or 1
    with ray_connection(address, num_cpus=max(num_workers, num_cpus)):
        scores = score_on_ray(
            # Actors have a working directory of Ray's.
            replace(job, checkpoint=job.checkpoint.resolve(), data=job.data.resolve()),
            chunks,
            num_workers=num_workers,
            # Assumes that all actors are on a machine like this one.
            num_threads=max(1, num_cpus // num_workers),
            on_progress=on_progress,
        )
    return summarise(scores, chunks, job.settings)


def score_on_ray(
    job: EvaluationJob,
    chunks: list[EvaluationChunk],
    *,
    num_workers: int,
    num_threads: int,
    on_progress: Callable[[int, int], None],
) -> list[LossSums]:
    """The loss sums of each chunk, in order. Requires a Ray connection and absolute paths."""
    import ray
    from ray.util import ActorPool

    remote = ray.remote(num_cpus=1, num_gpus=int(uses_gpus(num_workers)))(EvaluationWorker)
    workers = [remote.remote(job, num_threads) for _ in range(num_workers)]
    groups = [
        chunks[first : first + job.batch_chunks]
        for first in range(0, len(chunks), job.batch_chunks)
    ]
    scores: list[LossSums] = []
    try:
        for error in ray.get([worker.open.remote() for worker in workers]):
            if error is not None:
                raise error
        # `map` yields in the order of the groups, not in the order of completion.
        results = ActorPool(workers).map(lambda worker, group: worker.score.remote(group), groups)
        for result in results:
            if isinstance(result, TxlError):
                raise result
            scores.extend(result)
            on_progress(len(scores), len(chunks))
    except ray.exceptions.RayTaskError:
        raise  # a bug: keep the actor's traceback
    except ray.exceptions.RayError as error:
        ids = [worker._actor_id.hex() for worker in workers]
        raise _dead_worker_error(error, ids, job) from None
    return scores


def _dead_worker_error(error: Exception, worker_ids: list[str], job: EvaluationJob) -> TxlError:
    """One sentence per fact, instead of Ray's text, which lists every possible cause."""
    text = str(error)
    number = next((n for n, actor_id in enumerate(worker_ids) if actor_id in text), None)
    name = "a worker" if number is None else f"worker {number} of {len(worker_ids)}"
    location = "".join(
        f", {label} {match[1]}"
        for label, field in (("pid", "pid"), ("node", "ip"))
        if (match := re.search(rf"^\s*{field}: (\S+)", text, re.MULTILINE))
    )
    return TxlError(
        f"{name}{location} died while it scored split {job.settings.split} of {job.data}; the "
        "scores so far are lost. Most likely its node ran out of memory (SIGKILL: see dmesg "
        f"there). Run the same command with a smaller --batch (now {job.batch_chunks}) or fewer "
        f"--workers (now {len(worker_ids)})"
    )
