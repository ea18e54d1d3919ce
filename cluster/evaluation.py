"""Evaluation on Ray: chunks of a split dealt to actors, their sums added in the chunks' order.

Every actor loads the model once. Chunks go out in small groups to whoever is free; what comes back
is kept by chunk, so the result does not depend on who was faster.
"""

import os
import re
from collections.abc import Callable, Sequence

import torch

from cluster.session import ray_session, uses_gpus
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
    """One actor: a model and a split, opened once."""

    def __init__(self, job: EvaluationJob, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._job = job

    def open(self) -> TxlError | None:
        """Load everything; an error comes back as a value, whole, for the driver to raise."""
        try:
            self._scorer = self._job.open()
        except TxlError as error:
            return error
        return None

    def score(self, chunks: Sequence[EvaluationChunk]) -> list[LossSums] | TxlError:
        """The sums of some chunks, in order."""
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
    """Score a split with `num_workers` actors. Raises the first TxlError of any of them."""
    trained = find_model(job.checkpoint)
    source = open_split(job.data, job.settings.split)
    chunks = plan_evaluation(source, job.settings, n_layer=trained.config.n_layer)
    absolute = EvaluationJob(
        checkpoint=job.checkpoint.resolve(),
        data=job.data.resolve(),
        settings=job.settings,
        batch_chunks=job.batch_chunks,
    )
    num_cpus = os.cpu_count() or 1
    with ray_session(address, num_cpus=max(num_workers, num_cpus)):
        scores = score_on_ray(
            absolute,
            chunks,
            num_workers=num_workers,
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
    """The sums of `chunks`, in order, from inside a `ray_session`; `job` has absolute paths."""
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
        outcomes = ActorPool(workers).map(lambda worker, group: worker.score.remote(group), groups)
        for outcome in outcomes:
            if isinstance(outcome, TxlError):
                raise outcome
            scores.extend(outcome)
            on_progress(len(scores), len(chunks))
    except ray.exceptions.RayTaskError:
        raise  # a mistake of ours, with its traceback
    except ray.exceptions.RayError as error:
        ids = [worker._actor_id.hex() for worker in workers]
        raise _worker_died(error, ids, job) from None
    return scores


def _worker_died(error: Exception, worker_ids: list[str], job: EvaluationJob) -> TxlError:
    """An error for people from Ray's, whose text is a page about every possible cause."""
    reason = str(error)
    number = next((n for n, actor_id in enumerate(worker_ids) if actor_id in reason), None)
    name = "a worker" if number is None else f"worker {number} of {len(worker_ids)}"
    place = "".join(
        f", {label} {match[1]}"
        for label, field in (("pid", "pid"), ("node", "ip"))
        if (match := re.search(rf"^\s*{field}: (\S+)", reason, re.MULTILINE))
    )
    return TxlError(
        f"{name}{place} died while it scored split {job.settings.split} of {job.data}; what the "
        "others had scored is lost. Most often its node ran out of memory and the kernel or Ray "
        f"killed it (dmesg there says so). Run the same command with a smaller --batch (now "
        f"{job.batch_chunks}) or fewer --workers (now {len(worker_ids)})"
    )
