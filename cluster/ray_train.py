"""Train with Ray Train: it starts the ranks, and ends all of them when one fails.

    launcher: train_on_ray -> Supervisor (main thread)
                           -> _fit -> Ray Train's controller   (thread; once per start of the ranks)
    worker:   train_loop -> run_rank -> train_rank   (trainer.py, rank_worker.py)

Ray Train's own restarts, resizes and checkpoints are not used: the supervisor decides, and ranks
resume from the newest good checkpoint of the run directory, as under every other launcher
(docs/decisions/0026-elastic-ranks-and-preemption.md). Ray Train runs a rank in a thread, where no
signal can be caught. So the launcher catches the stop signals and creates a stop file, which the
training loop checks after every step.

Ray Train takes seconds to import. A thread does that while Ray starts.
"""

import os
from pathlib import Path

from cluster.connection import ray_connection, ray_log
from cluster.nodes import ClusterMonitor, Placement, place_ranks
from cluster.rank_plan import RankPlan
from cluster.rank_starts import StartOutcome
from cluster.supervisor import Supervisor
from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import TxlError
from txl_dist.launch.launch_files import LaunchFiles
from txl_dist.launch.launcher import OnLine
from txl_dist.launch.rank_range import RankRange
from txl_dist.launch.supervision import RestartBudget
from txl_dist.runtime.heartbeat import MARGIN_SECONDS
from txl_dist.training.job import TrainJob
from txl_dist.training.run_directory import SECONDS_TO_END, RunDirectory


def train_on_ray(
    job: TrainJob,
    *,
    ranks: RankRange,
    address: str | None,
    on_line: OnLine,
    max_restarts: int | None = None,
) -> None:
    """Run `job` to its end. Raises the TxlError that ended it.

    `max_restarts` None: `ray.max_restarts` of the config.
    """
    directory = RunDirectory(job.run_path)
    directory.create()
    # Raises if another run uses the directory, before Ray starts.
    with directory.locked(timeout_seconds=SECONDS_TO_END, force=job.force_unlock):
        pass
    # For runs of one rank, and if all hang: else the ranks that wait name the one that hangs.
    limit_seconds = job.config.training.rank_timeout_seconds + MARGIN_SECONDS
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", f"{limit_seconds:g}")
    files = LaunchFiles(directory.path, job.launch_id)
    job = job.model_copy(update={"stop_file": str(files.stop), "saved_file": str(files.saved)})
    supervisor = Supervisor(
        directory,
        files,
        plan=RankPlan(ranks, growth_interval_seconds=job.config.ray.growth_interval_seconds),
        address=address,
        config=job.config,
        budget=RestartBudget(job.config.ray.max_restarts if max_restarts is None else max_restarts),
        on_line=on_line,
    )

    def run_ray() -> None:
        # Ray starts a rank only if its CPUs are free, so a private Ray has enough for all.
        num_cpus = ranks.maximum * (job.config.ray.cpus_per_rank or 1)
        num_cpus += job.config.evaluation.on == "workers"  # its actor
        with ray_connection(
            address, num_cpus=max(num_cpus, os.cpu_count() or 1), meanwhile=_import_ray_train
        ):
            placement = place_ranks(job.config.ray, ranks.minimum, is_private=address is None)
            with (
                ray_log(directory.logs / "ray.log"),
                ClusterMonitor(
                    use_gpu=placement.use_gpu, placement=placement
                ) as supervisor.monitor,
            ):
                end = StartOutcome.NOT_STARTED
                while num_ranks := supervisor.starts.wait():
                    end = _fit(
                        job,
                        num_ranks,
                        address=address,
                        placement=placement,
                        is_elastic=ranks.is_elastic,
                    )
                    supervisor.starts.end(end)
                has_returned = end is StartOutcome.RETURNED
                supervisor.set_ended(None if has_returned else TxlError("the ranks failed"))

    with files.held():
        supervisor.run(run_ray)


def _import_ray_train() -> None:
    """What `_fit` imports."""
    import cluster.trainer  # noqa: F401


def _fit(
    job: TrainJob,
    num_ranks: int,
    *,
    address: str | None,
    placement: Placement,
    is_elastic: bool,
) -> StartOutcome:
    """Run Ray Train until the ranks have ended; returns how. Raises TxlError if a restart cannot
    help.

    If the resources of the ranks are not free within a minute, Ray Train waits on; with
    `is_elastic` it gives up, and fewer ranks may start.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError

    from cluster.failure_callback import FailureCallback
    from cluster.trainer import RankBackendConfig, RankTrainer, train_loop

    trainer = RankTrainer(
        train_loop,
        train_loop_config={
            "job": job.to_json(),
            "working_directory": str(Path.cwd()),
            "address": address,
        },
        scaling_config=ScalingConfig(num_workers=num_ranks, **placement.scaling_options()),
        backend_config=RankBackendConfig(use_gpu=placement.use_gpu),
        run_config=RunConfig(
            name="ray",  # Ray Train keeps its own state in RUN/ray
            storage_path=str(job.run_path.resolve()),
            failure_config=FailureConfig(
                max_failures=0,
                max_preemption_failures=0,
                controller_failure_limit=0 if is_elastic else -1,
            ),
            callbacks=[FailureCallback(job.run_path.resolve(), job.launch_id)],
        ),
    )
    try:
        trainer.fit()
    except ControllerError as error:
        if isinstance(error.controller_failure, WorkerGroupStartupTimeoutError):
            return StartOutcome.NOT_STARTED
        raise TxlError(
            f"Ray Train ended the run: {error}. Logs of all ranks: "
            f"{RunDirectory(job.run_path).logs}. {resume_advice(job.run_path)}"
        ) from error
    except TrainingFailedError:  # of ranks; FailureCallback has recorded it
        return StartOutcome.FAILED
    return StartOutcome.RETURNED
