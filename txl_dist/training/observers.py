"""The observers of a run, and its tracker. A new observer is one class and one entry here."""

from contextlib import ExitStack, closing
from pathlib import Path

from data_pipeline.system.files import write_file
from txl_dist.model.flops import training_flops
from txl_dist.runtime.device import TORCH_DTYPE
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.process import TrackingProcess
from txl_dist.training.begin import Beginning, RankContext
from txl_dist.training.data import Corpus
from txl_dist.training.diagnostics import LearningCheck, StepProfiler
from txl_dist.training.goodput import Goodput
from txl_dist.training.observer import Observer, Observers
from txl_dist.training.report import Report
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.speed import StragglerCheck, Utilisation
from txl_dist.training.state import TrainState


def build_observers(
    rank: RankContext, beginning: Beginning, state: TrainState, *, reached_step: int
) -> Observers:
    """The observers of this rank, in the order in which they are called. Collective.

    `reached_step`: the last step that earlier processes have trained (`open_run`).
    """
    world, config = rank.world, rank.config
    data = config.data
    flops = training_flops(
        rank.data.model_config,
        num_lanes=data.num_lanes,
        tgt_len=data.tgt_len,
        num_segments=config.training.backprop_segments,
    )
    observers: list[Observer | None] = [
        Utilisation(
            world,
            TORCH_DTYPE[config.precision],
            flops_per_token=flops / (data.num_lanes * data.tgt_len),
        ),
        StragglerCheck(world, zero_stage=config.deepspeed.zero_stage),
        _profiler(rank),
    ]
    # Of the whole run, so that a change of settings does not move the check. Raises on all ranks.
    learning = world.run_on_all(
        lambda: LearningCheck.of(rank.job.config, rank.data, state) if world.is_rank_zero else None
    )[0]
    if world.is_rank_zero:
        attempt = rank.directory.checkpoints.attempt
        goodput = Goodput(
            rank.directory.goodput,
            world.activity,
            step=state.step,
            kept_step=beginning.kept_step,
            reached_step=reached_step,
            is_restart=beginning.is_new_attempt,
            is_finished=state.step == config.num_steps,
            may_write=lambda: attempt is None or attempt.is_newest,
        )
        journal = rank.stack.enter_context(MetricsJournal(rank.directory.metrics))
        scored = rank.data.evaluation.label if rank.data.evaluation else None
        report = Report(journal, world.activity, config, scored=scored)
        # First, because others need the speed that it adds to a line.
        observers = [report, goodput, learning, *observers]
    return Observers(observer for observer in observers if observer is not None)


def _profiler(rank: RankContext) -> StepProfiler | None:
    training, world = rank.config.training, rank.world
    if training.profile_steps is None or world.rank != 0:
        return None
    first_step, last_step = training.profile_steps
    profiler = StepProfiler(
        rank.directory.path / "profile",
        rank=rank.world.rank,
        first_step=first_step,
        last_step=last_step,
    )
    return rank.stack.enter_context(closing(profiler))


def start_tracker(rank: RankContext, stack: ExitStack) -> TrackingProcess | None:
    """Start sending metrics to MLflow. The status of the run depends on how `stack` is closed."""
    # Rank 0 only: MLflow would record one copy per rank.
    if not (rank.world.is_rank_zero and rank.config.tracking.enabled):
        return None
    corpora = rank.data.corpora
    tags = {"num_ranks": str(rank.world.num_ranks)}
    if len(corpora) > 1:
        tags |= {f"data.{corpus.name}": corpus.manifest.digest for corpus in corpora}
    manifest = _local_manifest(corpora[0], rank.directory) if len(corpora) == 1 else None
    tracker = TrackingProcess.start(
        rank.directory.path, rank.job.config, data_manifest=manifest, tags=tags
    )
    return stack.enter_context(tracker)


def _local_manifest(corpus: Corpus, directory: RunDirectory) -> Path:
    """A file with the dataset's manifest; for a dataset at a URL, a copy."""
    # The tracking process uploads a file, so it needs a local one.
    if isinstance(corpus.directory, Path):
        return corpus.directory / "manifest.json"
    copy = directory.path / "data-manifest.json"
    write_file(copy, corpus.manifest.to_bytes())
    return copy
