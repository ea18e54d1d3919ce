"""One rank of a run, from start to exit: called by every launcher in the process of the rank."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from data_pipeline.errors import counted, printable
from data_pipeline.system.signals import StopSignals
from txl_dist.checkpoint.directory import CheckpointDirectory, resume_advice
from txl_dist.errors import LostRankError, PreemptedError, TxlError
from txl_dist.runtime.device import deterministic
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.process import keep_freed_memory
from txl_dist.runtime.stop import StopDeadline, StopRequest
from txl_dist.runtime.waiting import CollectiveWatch
from txl_dist.runtime.world import World
from txl_dist.training.build import build_trainer
from txl_dist.training.loop import Trainer
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.spec import TrainSpec
from txl_dist.training.start import Start
from txl_dist.training.state import TrainState

log = logging.getLogger("txl_dist.training")


def train_rank(spec: TrainSpec, world: World) -> TrainState:
    """Take part in a run until it ends. Errors are logged and raised.

    A stop request before the first step ends the process immediately, with exit code 75. A later
    one asks to stop after the step. If that takes longer than `training.grace_seconds`, the process
    ends too, and its log says why.
    """
    fault_point("start")
    keep_freed_memory()  # before the first large allocation
    directory = RunDirectory(spec.run_path)
    directory.create()
    trainer: Trainer  # built below; the deadline describes it only once a step is completed
    with (
        deterministic(enabled=spec.config.training.deterministic),
        _logging_to(directory.log(world.rank)),
        StopSignals() as signals,
        StopDeadline(
            stop := StopRequest(signals, Path(spec.stop_file) if spec.stop_file else None),
            world.activity,
            describe_loss=lambda: describe_loss(trainer.state.step, directory.checkpoints),
            advice=partial(resume_advice, spec.run_path),
            grace_seconds=spec.config.training.grace_seconds,
            announce=world.is_rank_zero and not spec.stop_file,  # no launcher of ours does
        ),
        _explained_errors(spec, world, directory),
    ):
        log.info("rank %d is up", world.rank)
        with ExitStack() as stack:
            world.activity.reset()
            trainer = build_trainer(Start.open(spec, world, directory, stack, stop=stop))
            state = trainer.run()
        log.info("finished at step %d", state.step)
        return state


@contextmanager
def _explained_errors(spec: TrainSpec, world: World, directory: RunDirectory) -> Iterator[None]:
    """Log the error that ends a rank; LostRankError instead of it if another rank is the cause."""
    limit_seconds = spec.config.training.rank_timeout_seconds
    with CollectiveWatch(world, run=spec.run_path, limit_seconds=limit_seconds) as watch:
        try:
            yield
        except PreemptedError as request:
            log.info("%s", request)
            raise
        except TxlError as error:
            log.error("%s: %s", type(error).__name__, error)
            _record_error(directory, world, error)
            raise
        except Exception as error:
            # If a collective has failed, the cause is on another rank: report that instead.
            lost = watch.lost_rank_error(error)
            if lost is None:
                log.exception("rank %d failed", world.rank)
                _record_error(directory, world, error)
                raise
            lost = LostRankError(f"{lost}. {resume_advice(spec.run_path)}")
            reason = str(error).partition("\n")[0]
            log.error("%s (%s: %s)", lost, type(error).__name__, reason)
            _record_error(directory, world, lost)
            raise lost from error


def _record_error(directory: RunDirectory, world: World, error: Exception) -> None:
    """Write the event. If other ranks are lost because of this one, rank 0 says so for all."""
    text, rank = printable(f"{type(error).__name__}: {error}"), world.rank
    if not isinstance(error, LostRankError):
        directory.event_log.write("error", text, rank=rank)
    elif world.is_rank_zero:
        directory.event_log.write("rank_lost", text, rank=rank)


def describe_loss(step: int, checkpoints: CheckpointDirectory) -> str:
    """Which steps are lost if a process ends after `step`."""
    saved = checkpoints.steps()
    since = f"the checkpoint of step {saved[-1]}" if saved else "the start"
    num_lost = step - (saved[-1] if saved else 0)
    if num_lost <= 0:
        return "no step is lost"
    return f"the {counted(num_lost, 'step')} since {since} {'is' if num_lost == 1 else 'are'} lost"


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write the log of this project's packages to a file."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    loggers = [logging.getLogger(name) for name in ("txl_dist", "data_pipeline", "cluster")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):  # a full disk must not hide the error that ended the run
            handler.close()
