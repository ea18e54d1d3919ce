"""Builds the Trainer of one rank: TrainJob -> data -> model -> engine -> loop.

Every launcher uses this one chain. `build_trainer` calls the functions below it, in their order in
this file. Some are collective, so every rank has to call all of them in this order.
"""

import logging
import math
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from data_pipeline.storage.atomic_files import remove_leftovers, write_file
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segment_stream import SegmentStream
from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import dump_run_config, flatten_config
from txl_dist.config.run_config import RunConfig
from txl_dist.model.flops import training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.precision import MATMUL_DTYPE
from txl_dist.runtime.source_digest import code_description
from txl_dist.runtime.stop_request import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.data import Corpus, TrainingData
from txl_dist.training.engine import create_engine
from txl_dist.training.evaluator import build_evaluator
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Trainer
from txl_dist.training.phases import phases_from
from txl_dist.training.report import RankZeroReport, Report
from txl_dist.training.resume import ResumePoint, find_resume_point, remaining_work, restore
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.same_job import require_same_job
from txl_dist.training.saving import RunSaver
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep
from txl_dist.training.utilisation import Utilisation

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The inputs of all functions below: one rank of one job."""

    job: TrainJob
    world: World
    directory: RunDirectory
    stack: ExitStack
    data: TrainingData

    @property
    def config(self) -> RunConfig:
        return self.job.config


def build_trainer(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    stop: StopRequest | None = None,
) -> Trainer:
    """Open the data, join the ranks, resume or initialise, and build all parts of the run.

    Collective. Files, locks and threads are closed with `stack`.
    """
    config = job.config
    # Before the ranks meet: wrong data or config must not cost a rendezvous.
    data = TrainingData.open(config, num_ranks=world.num_ranks)
    rank = _Rank(job, world, directory, stack, data)
    world.join(timeout_seconds=config.training.rank_timeout_seconds)
    require_same_job(config, data, world)
    lock = directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS)
    world.run_on_rank_zero(lambda: stack.enter_context(lock))
    point = find_resume_point(job, data, world)
    fault_point("engine")
    step = _build_step(rank)
    if point is not None:
        restore(point, step.engine, step)
    state = _initial_state(rank, point)
    plan = data.plan_of(state.phases[-1])
    world.run_on_rank_zero(lambda: _open_run(rank, state, point))
    # Measured before the tracking process starts and competes for the processor.
    utilisation = _measure_utilisation(rank)
    tracker = _start_tracker(rank, new_run=point is None)
    report = _build_report(rank, utilisation)
    report.event("%s", _describe_start(rank, step, state, point))
    report.evaluation_plan(config.evaluation, data)
    if len(state.phases) > 1 or len(data.corpora) > 1:
        report.phase(state, is_new=state.phases[-1].position == state.position)
    return Trainer(
        config=config,
        plan=plan,
        segments=segment_pipeline(_open_stream(rank, step, state, plan)),
        step=step,
        report=report,
        stop=StopRequest() if stop is None else stop,
        saver=_build_saver(rank, step, tracker, point),
        evaluate=build_evaluator(config, data, step.engine, world),
        evaluated_data=data.evaluation.corpus.manifest.digest if data.evaluation else None,
        state=state,
    )


def _build_step(rank: _Rank) -> TrainStep:
    config, data, world = rank.config, rank.data, rank.world
    num_rows = data.plan.rows_per_rank(world.num_ranks)
    micro_batch_rows = min(num_rows, config.training.micro_batch_lanes or num_rows)
    # Equal on all ranks: at stage 3 every forward and backward is collective, so a rank with fewer
    # lanes computes padding rows.
    shape = {
        "num_micro_batches": math.ceil(num_rows / micro_batch_rows),
        "micro_batch_rows": micro_batch_rows,
    }
    model = TransformerXL(data.model_config, seed=config.seed)
    return TrainStep(
        create_engine(model, config, world, **shape),
        world,
        lanes=data.plan.lanes_of_rank(world.rank, world.num_ranks),
        seed=config.seed,
        byte_counts_V=torch.from_numpy(data.tokenizer.token_bytes()),
        **shape,
    )


def _initial_state(rank: _Rank, point: ResumePoint | None) -> TrainState:
    """The state to begin with. Its last phase reads the data of this job."""
    state = point.state if point else TrainState()
    num_lanes = rank.config.data.num_lanes
    phases = phases_from(
        state.phases, rank.data.phase, position=state.position, num_lanes=num_lanes
    )
    # A run without evaluation drops the pending evaluation of the run that it resumes.
    pending = state.evaluation_pending and rank.data.evaluation is not None
    return state.model_copy(update={"phases": phases, "evaluation_pending": pending})


def _open_run(rank: _Rank, state: TrainState, point: ResumePoint | None) -> None:
    """Make the run directory consistent with `state`: no later checkpoints, no later metrics."""
    directory, evaluation = rank.directory, rank.data.evaluation
    # Everything here is idempotent: a process killed at any line leaves a directory that the next
    # start makes consistent again.
    directory.checkpoints.open()
    best_step = state.best.step if state.best else None
    source = point.path if point else None
    for step in directory.checkpoints.rewind(state.step, best_step=best_step, source=source):
        log.warning("the checkpoint at step %d is renamed to superseded-*", step)
    for path in (directory.config, directory.metrics):
        remove_leftovers(path)
    write_file(directory.config, dump_run_config(rank.config).encode())
    # A process killed after writing a score to the journal, but before saving it, left this metric.
    redone = f"{evaluation.name}/loss" if evaluation and state.evaluation_pending else None
    with MetricsJournal(directory.metrics) as journal:
        journal.truncate_after(state.step, redone=redone)


def _measure_utilisation(rank: _Rank) -> Utilisation:
    data = rank.config.data
    flops = training_flops(rank.data.model_config, num_lanes=data.num_lanes, tgt_len=data.tgt_len)
    return Utilisation(rank.world, MATMUL_DTYPE[rank.config.precision], flops_per_step=flops)


def _start_tracker(rank: _Rank, *, new_run: bool) -> Tracker | None:
    """Start sending metrics to MLflow. The status of the run depends on how `stack` is closed."""
    # Rank 0 only: MLflow would record one copy per rank.
    if not (rank.world.is_rank_zero and rank.config.tracking.enabled):
        return None
    corpora = rank.data.corpora
    tags = {"num_ranks": str(rank.world.num_ranks)}
    if len(corpora) > 1:
        tags |= {f"data.{corpus.name}": corpus.manifest.digest for corpus in corpora}
    manifest = _local_manifest(corpora[0], rank.directory) if len(corpora) == 1 else None
    tracker = Tracker.start(
        rank.directory.path, rank.config, data_manifest=manifest, tags=tags, new_run=new_run
    )
    return rank.stack.enter_context(tracker)


def _local_manifest(corpus: Corpus, directory: RunDirectory) -> Path:
    """A file with the dataset's manifest; for a dataset at a URL, a copy."""
    # The tracking process uploads a file, so it needs a local one.
    if isinstance(corpus.directory, Path):
        return corpus.directory / "manifest.json"
    copy = directory.path / "data-manifest.json"
    write_file(copy, corpus.manifest.to_bytes())
    return copy


def _build_report(rank: _Rank, utilisation: Utilisation) -> Report:
    if not rank.world.is_rank_zero:
        return Report(utilisation)
    journal = rank.stack.enter_context(MetricsJournal(rank.directory.metrics))
    return RankZeroReport(utilisation, journal, num_steps=rank.config.training.num_steps)


def _describe_start(
    rank: _Rank, step: TrainStep, state: TrainState, point: ResumePoint | None
) -> str:
    config, world, num_steps = rank.config, rank.world, rank.config.training.num_steps
    remaining = remaining_work(state, num_steps=num_steps)
    if remaining is None:
        return (
            f"this run is finished: {state.step} of training.num_steps={num_steps} steps are done. "
            f"To train it further: training.num_steps={2 * state.step} --allow-change "
            "training.num_steps"
        )
    # From the shapes: at stage 3 the model itself holds empty parameters.
    num_parameters = sum(map(math.prod, step.engine.shapes.values()))
    start = f"resuming at step {state.step} from {point.path}" if point else "a new run"
    return (
        f"{start} | {num_parameters:,} parameters | {world.num_ranks} ranks on "
        f"{world.device.type} | ZeRO stage {config.deepspeed.zero_stage} | {config.precision} | "
        f"{config.data.num_lanes} lanes of {rank.data.plan.lane_tokens:,} tokens per epoch | "
        f"{remaining}"
    )


def _open_stream(rank: _Rank, step: TrainStep, state: TrainState, plan: LanePlan) -> SegmentStream:
    data = rank.config.data
    stream = SegmentStream(
        rank.data.source_of(state.phases[-1], rank.config),
        plan,
        lanes=step.lanes,
        num_rows=len(step.lane_of_row),
        reset=data.reset,
        shuffle=data.shuffle,
        seed=rank.config.seed,
        position=state.position,
        prefetch_segments=data.prefetch_segments,
    )
    return rank.stack.enter_context(closing(stream))


def _build_saver(
    rank: _Rank, step: TrainStep, tracker: Tracker | None, point: ResumePoint | None
) -> RunSaver:
    config, data, checkpoints = rank.config, rank.data, rank.directory.checkpoints
    header = CheckpointHeader(
        written_by=code_description(),
        model=asdict(data.model_config),
        run=flatten_config(config),
        tokenizer_json=data.tokenizer.to_json(),
        tokenizer_digest=data.tokenizer.digest,
        data_digest=data.digest,
        vocab_size=data.vocabulary.vocab_size,
        zero_stage=config.deepspeed.zero_stage,
        num_lanes=config.data.num_lanes,
    )
    return RunSaver(
        checkpoints,
        header=header,
        step=step,
        tracker=tracker,
        keep=config.training.keep_checkpoints,
        saved_file=Path(rank.job.saved_file) if rank.job.saved_file else None,
        saved_step=point.step_in(checkpoints) if point else None,
    )
