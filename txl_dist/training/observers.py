"""The observers of a run. A new observer is one class and one entry here."""

from contextlib import closing

from txl_dist.model.flops import training_flops
from txl_dist.runtime.device import TORCH_DTYPE
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.training.context import RankContext
from txl_dist.training.diagnostics import LearningCheck, StepProfiler
from txl_dist.training.goodput import RunEvents
from txl_dist.training.observer import Observer, Observers
from txl_dist.training.report import Report
from txl_dist.training.speed import StragglerCheck, Utilisation
from txl_dist.training.state import TrainState


def build_observers(rank: RankContext, state: TrainState) -> Observers:
    """The observers of this rank, in the order in which they are called. Collective."""
    world, config = rank.world, rank.config
    data = config.data
    flops = training_flops(
        rank.data.model_config,
        num_lanes=data.rows,
        tgt_len=data.tgt_len,
        num_segments=config.training.backprop_segments,
    )
    observers: list[Observer | None] = [
        Utilisation(
            world,
            TORCH_DTYPE[config.precision],
            flops_per_token=flops / data.tokens_per_step,
        ),
        StragglerCheck(world, zero_stage=config.deepspeed.zero_stage),
        _profiler(rank),
    ]
    # Raises on all ranks.
    learning = world.run_on_all(
        lambda: LearningCheck.of(config, rank.data, state) if world.is_rank_zero else None
    )[0]
    if world.is_rank_zero:
        journal = rank.stack.enter_context(MetricsJournal(rank.directory.metrics))
        scored = rank.data.evaluation.label if rank.data.evaluation else None
        events = RunEvents(rank.directory.event_log, world.activity, split=scored or "")
        report = Report(journal, world.activity, config, scored=scored)
        # First, because others need the speed that it adds to a line.
        observers = [report, events, learning, *observers]
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
