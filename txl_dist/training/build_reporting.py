"""Builds what observes a run: utilisation, MLflow tracker, report and profiler.

Called by `setup.py`. `measure_utilisation` and `build_report` are collective.
"""

import logging
import math
from contextlib import ExitStack, closing
from pathlib import Path

from data_pipeline.system.files import write_file
from txl_dist.model.attention import choose_attention
from txl_dist.model.flops import training_flops
from txl_dist.runtime.precision import TORCH_DTYPE
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.data import Corpus
from txl_dist.training.duration import how_to_extend
from txl_dist.training.goodput import Goodput
from txl_dist.training.inputs import RankContext
from txl_dist.training.learning_check import LearningCheck
from txl_dist.training.profiler import StepProfiler
from txl_dist.training.report import RankZeroReport, Report
from txl_dist.training.resume_point import ResumePoint
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.start_state import remaining_work
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep
from txl_dist.training.stragglers import StragglerCheck
from txl_dist.training.utilisation import Utilisation

log = logging.getLogger(__name__)


def measure_utilisation(rank: RankContext) -> Utilisation:
    data = rank.config.data
    flops = training_flops(rank.data.model_config, num_lanes=data.num_lanes, tgt_len=data.tgt_len)
    return Utilisation(rank.world, TORCH_DTYPE[rank.config.precision], flops_per_step=flops)


def start_tracker(rank: RankContext, stack: ExitStack, *, new_run: bool) -> Tracker | None:
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
        rank.directory.path, rank.job.config, data_manifest=manifest, tags=tags, new_run=new_run
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


def build_report(
    rank: RankContext,
    utilisation: Utilisation,
    state: TrainState,
    point: ResumePoint | None,
    *,
    reached_step: int,
    is_new_attempt: bool,
) -> Report:
    """`reached_step`: the last step of the metrics before the steps after `state` were removed."""
    world, config = rank.world, rank.config
    stragglers = StragglerCheck(world, zero_stage=config.deepspeed.zero_stage)
    # Of the whole run, so that a change of settings does not move the check.
    learning = world.run_on_all(
        lambda: LearningCheck.of(rank.job.config, rank.data, state) if world.is_rank_zero else None
    )[0]
    if not world.is_rank_zero:
        return Report(utilisation, stragglers)
    journal = rank.stack.enter_context(MetricsJournal(rank.directory.metrics))
    attempt = rank.directory.checkpoints.attempt
    goodput = Goodput(
        rank.directory.goodput,
        world.activity,
        step=state.step,
        kept_step=point.kept_step if point else 0,
        reached_step=reached_step,
        is_restart=is_new_attempt,
        is_finished=state.step == config.num_steps,
        may_write=lambda: attempt is None or attempt.is_newest,
    )
    evaluation = rank.data.evaluation
    return RankZeroReport(
        utilisation,
        stragglers,
        journal,
        goodput,
        tokens_after=config.tokens_after,
        scored=evaluation.label if evaluation else None,
        learning=learning,
    )


def build_profiler(rank: RankContext) -> StepProfiler | None:
    training, world = rank.config.training, rank.world
    if training.profile_steps is None:
        return None
    absent = [number for number in training.profile_ranks if number >= world.num_ranks]
    if absent and world.rank == 0:  # not refused: the number of ranks may change at every start
        log.warning(
            "training.profile_ranks has %s, but the ranks are 0 to %d: no trace of these",
            ", ".join(map(str, absent)),
            world.num_ranks - 1,
        )
    if world.rank not in training.profile_ranks:
        return None
    first_step, last_step = training.profile_steps
    profiler = StepProfiler(
        rank.directory.path / "profile",
        rank=rank.world.rank,
        first_step=first_step,
        last_step=last_step,
    )
    return rank.stack.enter_context(closing(profiler))


def describe_start(
    rank: RankContext, step: TrainStep, state: TrainState, point: ResumePoint | None
) -> str:
    config, world, num_steps = rank.config, rank.world, rank.config.num_steps
    remaining = remaining_work(state, num_steps=num_steps)
    if remaining is None:
        return (
            f"this run is finished: {state.step} of training.num_steps={num_steps} steps are done. "
            f"To train it further: {how_to_extend(config, num_steps=state.step)}"
        )
    # From the shapes: at stage 3 the model itself holds empty parameters.
    num_parameters = sum(map(math.prod, step.engine.shapes.values()))
    start = f"resuming at step {state.step} from {point.path}" if point else "a new run"
    model = config.model
    attention = choose_attention(
        model.attention, device=world.device, with_dropout=model.dropatt > 0, d_head=model.d_head
    )
    return (
        f"{start} | {num_parameters:,} parameters | {world.num_ranks} ranks on "
        f"{world.device.type} | ZeRO stage {config.deepspeed.zero_stage} | {config.precision} | "
        f"{attention.__name__} | "
        f"{config.data.num_lanes} lanes of {rank.data.plan.lane_tokens:,} tokens per epoch | "
        f"{remaining}"
    )
