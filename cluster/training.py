"""Training under Ray Train: it starts the ranks, and starts them again when one dies.

What the ranks compute, and where they go on after a restart, is the project's own: the run
directory's newest good checkpoint. Ray Train runs ranks in threads, where no signal can be caught;
so this process catches SIGTERM and SIGINT and leaves a stop file, which the ranks look for.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from cluster.session import ray_session, uses_gpus
from txl_dist.errors import DivergedError, PreemptedError, TxlError
from txl_dist.launchers import OnLine
from txl_dist.training.follow import LogFollower
from txl_dist.training.job import TrainJob
from txl_dist.training.rank import train_rank
from txl_dist.training.run_directory import RunDirectory
from txl_dist.world import World

POLL_SECONDS = 0.2


def train_on_ray(job: TrainJob, *, num_ranks: int, address: str | None, on_line: OnLine) -> None:
    """Run `job` to its end. Raises the TxlError that ended it."""
    directory = RunDirectory(job.run_path)
    directory.create()
    with directory.locked():
        for left in directory.path.glob(".attempt-*"):  # of a launcher that was killed
            left.unlink(missing_ok=True)
    attempt = directory.path.resolve() / f".attempt-{job.attempt}"
    stop_file, saved_file = attempt.with_suffix(".stop"), attempt.with_suffix(".saved")
    job = job.model_copy(update={"stop_file": str(stop_file), "saved_file": str(saved_file)})
    try:
        with ExitStack() as stack:
            stack.enter_context(_signals_to(stop_file))
            stack.enter_context(ray_session(address, num_cpus=max(num_ranks, os.cpu_count() or 1)))
            stack.enter_context(_signals_to(stop_file))  # again: ray.init took SIGTERM for itself
            stack.enter_context(LogFollower(directory.log(0), on_line))
            failure = _fit(job, num_ranks)
    finally:
        stop_file.unlink(missing_ok=True)
        saved_file.unlink(missing_ok=True)
    if error := directory.failure(job.attempt):
        raise error
    if failure is not None:
        raise TxlError(
            f"the ranks failed more than ray.max_restarts={job.config.ray.max_restarts} times; the "
            f"last time: {failure}. Their logs: {directory.logs}. The same command resumes from "
            "the newest checkpoint"
        ) from failure


def _fit(job: TrainJob, num_ranks: int) -> Exception | None:
    """Run Ray Train; returns what ended it, if it was a failure."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    use_gpu = uses_gpus(num_ranks)
    trainer = TorchTrainer(
        _train_loop,
        train_loop_config={
            "job": job.to_json(),
            "working_directory": str(Path.cwd()),
            "num_threads": max(1, (os.cpu_count() or 1) // num_ranks),
        },
        scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=use_gpu),
        torch_config=TorchConfig(
            backend="nccl" if use_gpu else "gloo",
            timeout_s=int(job.config.training.rank_timeout_seconds),
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(job.run_path.resolve()),
            failure_config=FailureConfig(max_failures=job.config.ray.max_restarts),
        ),
    )
    outcome: list[Exception | None] = []

    def fit() -> None:
        try:
            trainer.fit()
            outcome.append(None)
        except TrainingFailedError as error:
            outcome.append(error)

    # In a thread of its own, because Ray Train would take SIGINT away from the main thread.
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
    return outcome[0] if outcome else RuntimeError("Ray Train ended without a result")


def _train_loop(settings: dict[str, Any]) -> None:
    """One rank, inside a Ray worker. Returns normally when a restart could not help."""
    import ray.train

    # Paths of the config are relative to where the command was given.
    os.chdir(settings["working_directory"])
    torch.set_num_threads(settings["num_threads"])
    context = ray.train.get_context()
    world = World(context.get_world_rank(), context.get_world_size(), context.get_local_rank())
    job = TrainJob.from_json(settings["job"])
    directory = RunDirectory(job.run_path)
    if directory.failure(job.attempt) is not None:
        return
    if job.saved_file and Path(job.saved_file).exists():
        # A restart: what this attempt saved comes before what the command line named.
        job = job.model_copy(update={"resume": "auto"})
    # An error of one rank makes Ray end the others; the next attempt finds it recorded and returns.
    # Errors that all ranks raise at the same step need no such round.
    try:
        train_rank(job, world)
    except TxlError as error:
        directory.record_failure(job.attempt, world.rank, error)
        if not isinstance(error, PreemptedError | DivergedError):
            raise


@contextmanager
def _signals_to(stop_file: Path) -> Iterator[None]:
    """SIGTERM and SIGINT create `stop_file`; a second one ends this process at once."""

    def stop(number: int, _frame: object) -> None:
        if stop_file.exists():
            os._exit(75)
        stop_file.touch()

    previous = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
