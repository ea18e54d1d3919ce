"""Builds the Trainer of one rank: TrainJob -> data -> model -> engine -> loop.

Every launcher uses this one chain. `build_trainer` calls the functions below it in their order in
this file. Most of them are collective, so all ranks must reach them in the same order.
"""

import logging
import math
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from data_pipeline.storage.atomic_files import remove_leftovers, write_file
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segments import SegmentStream
from txl_dist.checkpoint.directory import divergence_advice
from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import dump_run_config, flatten_config
from txl_dist.config.run_config import RunConfig
from txl_dist.model.flops import training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.precision import PRODUCT_DTYPE
from txl_dist.runtime.source_digest import code_description
from txl_dist.runtime.stop_signals import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.data import TrainingData
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


def build_trainer(
    job: TrainJob,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    stop: StopRequest | None = None,
) -> Trainer:
    """Open the data, join the ranks, resume or initialise, and build all parts of the run.

    Collective. What it opens is closed with `stack`.
    """
    config = job.config
    data = TrainingData.open(config, num_ranks=world.num_ranks)
    world.join(timeout_seconds=config.training.rank_timeout_seconds)
    require_same_job(config, data, world)
    world.run_on_rank_zero(lambda: _lock(directory, stack))
    point = find_resume_point(job, data, world)
    step = _build_step(config, data, world)
    if point is not None:
        restore(point, step.engine, step)
    state = _initial_state(config, data, point)
    plan = data.plan_of(state.phases[-1])
    world.run_on_rank_zero(lambda: _open_run(directory, config, data, state, point))
    # Measured before the tracking process starts and competes for the processor.
    utilisation = _measure_utilisation(config, data, world)
    tracker = _start_tracker(config, data, world, directory, stack, new_run=point is None)
    report = _build_report(config, world, directory, stack, utilisation)
    _report_start(report, config, data, step, state, point)
    return Trainer(
        config=config,
        plan=plan,
        segments=segment_pipeline(
            stack.enter_context(_open_stream(config, data, step, state, plan))
        ),
        step=step,
        report=report,
        stop=StopRequest() if stop is None else stop,
        saver=_build_saver(job, data, directory, step, tracker, point),
        evaluate=build_evaluator(config, data, step.engine, world),
        evaluated_data=data.evaluation.corpus.manifest.digest if data.evaluation else None,
        state=state,
        divergence_advice=partial(divergence_advice, directory.path),
    )


def _lock(directory: RunDirectory, stack: ExitStack) -> None:
    stack.enter_context(directory.locked(timeout_seconds=LOCK_TIMEOUT_SECONDS))


def _build_step(config: RunConfig, data: TrainingData, world: World) -> TrainStep:
    num_rows = data.plan.rows_per_rank(world.num_ranks)
    micro_batch_rows = min(num_rows, config.training.micro_batch_lanes or num_rows)
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


def _initial_state(config: RunConfig, data: TrainingData, point: ResumePoint | None) -> TrainState:
    """The state to begin with; its last phase reads the data of this run."""
    state = point.state if point else TrainState()
    phases = phases_from(
        state.phases, data.phase, position=state.position, num_lanes=config.data.num_lanes
    )
    # A run without evaluation drops the pending evaluation of the run that it resumes.
    pending = state.evaluation_pending and data.evaluation is not None
    return state.model_copy(update={"phases": phases, "evaluation_pending": pending})


def _open_run(
    directory: RunDirectory,
    config: RunConfig,
    data: TrainingData,
    state: TrainState,
    point: ResumePoint | None,
) -> None:
    """Make the run directory consistent with `state`: no later checkpoints, no later metrics."""
    checkpoints = directory.checkpoints
    checkpoints.open()
    for step in checkpoints.rewind(
        state.step,
        best_step=state.best.step if state.best else None,
        source=point.path if point else None,
    ):
        log.warning("the checkpoint at step %d is renamed to superseded-*", step)
    for path in (directory.config, directory.metrics):
        remove_leftovers(path)
    write_file(directory.config, dump_run_config(config).encode())
    # A pending evaluation is done again: its line may already be in the journal.
    redone = (
        f"{data.evaluation.name}/loss" if data.evaluation and state.evaluation_pending else None
    )
    with MetricsJournal(directory.metrics) as journal:
        journal.truncate_after(state.step, redone=redone)


def _measure_utilisation(config: RunConfig, data: TrainingData, world: World) -> Utilisation:
    flops = training_flops(
        data.model_config, num_lanes=config.data.num_lanes, tgt_len=config.data.tgt_len
    )
    return Utilisation(world, PRODUCT_DTYPE[config.precision], flops_per_step=flops)


def _start_tracker(
    config: RunConfig,
    data: TrainingData,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    *,
    new_run: bool,
) -> Tracker | None:
    """Start sending metrics to MLflow. The run's end status depends on how `stack` is closed."""
    if not (world.is_rank_zero and config.tracking.enabled):  # every rank would log the same
        return None
    tags = {"num_ranks": str(world.num_ranks)}
    if len(data.corpora) > 1:
        tags |= {f"data.{corpus.name}": corpus.manifest.digest for corpus in data.corpora}
    tracker = Tracker.start(
        directory.path,
        config,
        data_manifest=_local_manifest(data, directory),
        tags=tags,
        new_run=new_run,
    )
    return stack.enter_context(tracker)


def _local_manifest(data: TrainingData, directory: RunDirectory) -> Path | None:
    """A local file with the dataset's manifest; None for a mixture, whose digests are tags."""
    if len(data.corpora) > 1:
        return None
    (corpus,) = data.corpora
    if isinstance(corpus.directory, Path):
        return corpus.directory / "manifest.json"
    copy = directory.path / "data-manifest.json"
    write_file(copy, corpus.manifest.to_bytes())
    return copy


def _build_report(
    config: RunConfig,
    world: World,
    directory: RunDirectory,
    stack: ExitStack,
    utilisation: Utilisation,
) -> Report:
    if not world.is_rank_zero:
        return Report(utilisation)
    journal = stack.enter_context(MetricsJournal(directory.metrics))
    return RankZeroReport(utilisation, journal, num_steps=config.training.num_steps)


def _report_start(
    report: Report,
    config: RunConfig,
    data: TrainingData,
    step: TrainStep,
    state: TrainState,
    point: ResumePoint | None,
) -> None:
    report.event("%s", _describe_start(config, data, step, state, point))
    report.evaluation_plan(config.evaluation, data)
    phase = state.phases[-1]
    if len(state.phases) > 1 or len(phase.corpora) > 1:
        report.phase(state, is_new=phase.position == state.position)


def _describe_start(
    config: RunConfig,
    data: TrainingData,
    step: TrainStep,
    state: TrainState,
    point: ResumePoint | None,
) -> str:
    num_steps, world = config.training.num_steps, step.world
    remaining = remaining_work(state, num_steps=num_steps)
    if remaining is None:
        return (
            f"this run is finished: {state.step} of training.num_steps={num_steps} steps are done. "
            f"To train it further: training.num_steps={2 * state.step} --allow-change "
            "training.num_steps"
        )
    num_parameters = sum(map(math.prod, step.engine.shapes.values()))
    start = f"resuming at step {state.step} from {point.path}" if point else "a new run"
    return (
        f"{start} | {num_parameters:,} parameters | {world.num_ranks} ranks on "
        f"{world.device.type} | ZeRO stage {config.deepspeed.zero_stage} | {config.precision} | "
        f"{config.data.num_lanes} lanes of {data.plan.lane_tokens:,} tokens per epoch | {remaining}"
    )


def _open_stream(
    config: RunConfig, data: TrainingData, step: TrainStep, state: TrainState, plan: LanePlan
) -> closing[SegmentStream]:
    return closing(
        SegmentStream(
            data.source_of(state.phases[-1], config),
            plan,
            lanes=step.lanes,
            num_rows=len(step.lane_of_row),
            reset=config.data.reset,
            shuffle=config.data.shuffle,
            seed=config.seed,
            position=state.position,
            prefetch_segments=config.data.prefetch_segments,
        )
    )


def _build_saver(
    job: TrainJob,
    data: TrainingData,
    directory: RunDirectory,
    step: TrainStep,
    tracker: Tracker | None,
    point: ResumePoint | None,
) -> RunSaver:
    config = job.config
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
        directory.checkpoints,
        header=header,
        step=step,
        tracker=tracker,
        keep=config.training.keep_checkpoints,
        saved_file=Path(job.saved_file) if job.saved_file else None,
        saved_step=point.step_in(directory.checkpoints) if point else None,
    )
