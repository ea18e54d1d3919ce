"""The report of a run, on rank 0: metrics.jsonl, events.jsonl, the step line, and the log.

    start -> (segment -> step -> line -> report -> save) ... -> end
                          score, divergence and rollback at any time

The loop tells every `Observer` of these events, on all ranks after the same step. `Report` is on
rank 0. Another one is a class and an entry in `rank.py`, which decides on which ranks it is: on all
of them, it may call collectives. No observer depends on the others: a value that one adds to a line
is not read before `report`.

Loss sums are collected in `TrainState.unreported` until a line is due. They are stored in the
checkpoint, so a resumed run writes the same lines as an uninterrupted one.
"""

import logging
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from data_pipeline.errors import clock, counted
from txl_dist.config.run_config import RunConfig
from txl_dist.evaluation.scores import in_lines
from txl_dist.events import (
    AttemptStart,
    EventLog,
    Kind,
    WallTime,
    goodput_of,
    process_seconds,
    read_events,
)
from txl_dist.model.attention import choose_implementation
from txl_dist.runtime.device import describe_machine
from txl_dist.runtime.process import Activity, Span
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.training.data import DEFAULT_SPLIT, TrainingData
from txl_dist.training.phases import count_tokens, realised_shares
from txl_dist.training.scores import StepScore
from txl_dist.training.start import Start
from txl_dist.training.state import TrainState
from txl_dist.training.step import StepResult, lr_at

log = logging.getLogger(__name__)

Values = dict[str, float]


class Observer:
    """Does nothing at any event. Subclasses override what they need."""

    def start(self, state: TrainState) -> None:
        """The run begins at `state`, after a resume if it has steps."""

    def segment(self, step: int) -> None:
        """Step number `step` begins: the loop is about to wait for its segment."""

    def step(self, state: TrainState, result: StepResult) -> None:
        """A step is done, or was skipped or rejected. `state` is that after it."""

    def line(self, state: TrainState, values: Values) -> None:
        """A line of metrics is due for the steps in `state.unreported`: add to its values."""

    def report(self, state: TrainState, values: Values) -> None:
        """The values of that line are complete."""

    def save(self, state: TrainState) -> None:
        """A checkpoint of `state` is going to be saved."""

    def score(self, score: StepScore, gain: float | None) -> None:
        """A step has a score, or never will. `gain`: that of `StepScore.gain_over` the best one."""

    def divergence(self, step: int, reason: str) -> None:
        """Step number `step` has diverged; what follows depends on `divergence.policy`."""

    def rollback(self, state: TrainState, reached_step: int) -> None:
        """The run has returned to `state` from `reached_step`."""

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        """The run ends at `state`. `is_complete`: no step is left. `is_stopped`: on request."""


@dataclass(eq=False)
class Report(Observer):
    """Adds loss, speed and goodput to each line, and writes all values of it; writes the events.

    `activity` measures this process. `log_start` has written the event of the start.

    MFU is the FLOP/s of the run divided by `peak_flops`, the measured peak of all ranks. If other
    processes have used the machine at that time, a higher rate of the run becomes the peak.
    """

    journal: MetricsJournal
    events: EventLog
    activity: Activity
    config: RunConfig
    _: KW_ONLY
    flops_per_token: float
    peak_flops: float

    def __post_init__(self) -> None:
        self._time = WallTime()
        self._has_line = False
        self._before: dict[Span, float] | None = None
        """Seconds by span at the last line; None until a step begins."""
        self._num_steps = 0
        """Steps computed since the last line. After a resume, fewer than those of the loss sums."""
        self._seconds = self._excluded_seconds = 0.0
        """From the start of training in this process to the last line."""

    def start(self, state: TrainState) -> None:
        try:
            self._time = WallTime.of(read_events(self.events.path.parent))
        except OSError as error:
            log.warning("%s cannot be read (%s)", self.events.path, error.strerror)

    def _event(self, kind: Kind, text: str, **fields: Any) -> None:
        self._time.take(self.events.write(kind, text, **fields))

    def _event_with_seconds(self, kind: Kind, text: str, state: TrainState, **fields: Any) -> None:
        self._event(kind, text, step=state.step, seconds=process_seconds(self.activity), **fields)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by cause since the first start of the run; their sum is the wall time."""
        return self._time.with_process(process_seconds(self.activity))

    def segment(self, step: int) -> None:
        if self.activity.num_steps == 0 and self._before is None:
            self._event("first_batch", "first batch")
        # What preceded the first step, such as an evaluation, is not expected again.
        self._before = self._before or self.activity.seconds()

    def step(self, state: TrainState, result: StepResult) -> None:
        self._num_steps += result.is_update or result.event is not None

    def line(self, state: TrainState, values: Values) -> None:
        # Without trained targets (skipped steps, a segment of one token), only the counters: the
        # next line covers these steps too.
        last = state.last_update
        sums = state.unreported_sums
        if sums.num_tokens and last is not None:
            values |= {
                **sums.metrics,
                "lr": lr_at(last.step, self.config.optimizer, num_steps=self.config.num_steps),
                "gradient_norm": last.gradient_norm,
                "memory_valid": last.memory_valid,
                **self._speed(sums.num_tokens / state.unreported_steps),
            }
            # Evaluations and saves are expected to take the same share of time as until now.
            step_share = max(1e-9, 1 - self._excluded_seconds / max(1e-9, self._seconds))
            steps_left, speed = self.config.num_steps - state.step, values["tokens_per_second"]
            tokens_left = steps_left * self.config.data.tokens_per_step
            values["seconds_left"] = tokens_left / speed / step_share
            flops = self.flops_per_token * speed
            self.peak_flops = max(self.peak_flops, flops)
            values |= {"mfu": flops / self.peak_flops, "peak_flops": self.peak_flops}
        values |= {
            **_counters(state),
            "goodput": goodput_of(self.seconds),
            "restarts": self._time.restarts,
            "lost_steps": self._time.lost_steps,
        }

    def _speed(self, tokens_per_step: float) -> Values:
        """The speed since the last line, and what the loop waited for."""
        assert self._before is not None
        now = self.activity.seconds()
        spent = {span: now[span] - self._before[span] for span in Span}
        # Evaluations and saves do not count in the speed of training.
        total, excluded = sum(spent.values()), spent[Span.EVALUATION] + spent[Span.SAVE_WAIT]
        # After a resume the sums cover more steps than this process has timed, so the speed is
        # computed from its own steps. A coarse clock may show no time between two short steps.
        seconds, total = max(1e-9, total - excluded), max(1e-9, total)
        self._seconds += total
        self._excluded_seconds += excluded
        num_steps, self._before, self._num_steps = self._num_steps, now, 0
        return {
            "tokens_per_second": tokens_per_step * max(1, num_steps) / seconds,
            "data_wait": spent[Span.DATA_WAIT] / seconds,
            # Of all the time, because they are excluded from `seconds`.
            "save_wait": spent[Span.SAVE_WAIT] / total,
            "evaluation_wait": spent[Span.EVALUATION] / total,
        }

    def report(self, state: TrainState, values: Values) -> None:
        if line := values if "loss" in values else _counters(state):
            self.journal.write(
                {"step": state.step, "tokens": state.tokens, "time": time.time(), **line}
            )
        if "loss" in values:
            log.info("%s", step_line(state.step, values))
            if not self._has_line:
                self._has_line = True
                self._event("first_line", f"first step line, of step {state.step}", step=state.step)

    def save(self, state: TrainState) -> None:
        self.journal.sync()  # a resume from this checkpoint keeps all lines up to its step
        self._event_with_seconds("save", f"checkpoint of step {state.step}", state)

    def divergence(self, step: int, reason: str) -> None:
        self._event("divergence", f"step {step} has diverged: {reason}", step=step)

    def rollback(self, state: TrainState, reached_step: int) -> None:
        self.journal.sync()
        self.journal.truncate_after(state.step)
        self._before, self._num_steps = None, 0
        text = f"returned from step {reached_step} to the checkpoint of step {state.step}"
        self._event_with_seconds("rollback", text, state, reached_step=reached_step)

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        kind: Kind = "finished" if is_complete else "stopped" if is_stopped else "failed"
        self._event_with_seconds(kind, f"{kind} at step {state.step}", state)
        if self.activity.num_steps > 0:
            log.info("summary | %s", self._time)

    def score(self, score: StepScore, gain: float | None) -> None:
        best = ", the best so far" if gain is not None else ""
        text = f"evaluation at step {score.step}: {score.split} {score}{best}"
        self._event("score", text, step=score.step)
        if score.nats is None:
            log.warning("evaluation at step %d | WARNING: no score: %s", score.step, score.reason)
            return
        sums = score.sums
        self.journal.write(score.metrics())
        log.info(
            f"evaluation at step {score.step} | {score.split} "
            f"{' | '.join(in_lines(sums.metrics))} | {sums.num_tokens:,} targets"
            f"{f' | best so far, by {gain:.2g}' if gain else ''}"
        )


def log_start(
    start: Start, state: TrainState, *, shapes: Mapping[str, Sequence[int]], reached_step: int
) -> None:
    """Log what is trained and from where, and what is going to be evaluated; write the event.

    `shapes` of the parameters: at stage 3 the model itself holds empty ones. `reached_step`: the
    last step that earlier attempts have trained.
    """
    config, world, point = start.config, start.world, start.point
    host, machine = socket.gethostname(), describe_machine(world.device)
    log.info("machine | host %s: %s", host, machine)
    num_parameters = sum(map(math.prod, shapes.values()))
    computation = _computation(config, world)
    begin = f"resuming at step {state.step} from {point.path}" if point else "a new run"
    origin = "" if state.origin is None else str(state.origin)
    if start.origin is not None:
        begin += f" from the weights of {origin}"
    ranks = f"{counted(world.num_ranks, 'rank')} on {world.device.type} | {computation}"
    start.directory.event_log.write(
        "start",
        f"{begin} | {ranks}",
        step=state.step,
        reached_step=reached_step,
        start=AttemptStart(
            host=host,
            num_steps=config.num_steps,
            num_parameters=num_parameters,
            origin=origin,
            num_ranks=world.num_ranks,
            device=world.device.type,
            computation=computation,
            machine=machine,
            process_seconds=sum(world.activity.seconds().values()),
        ),
    )
    remaining = [f"the evaluation of step {state.step}"] if start.evaluation_is_pending else []
    if state.step < config.num_steps:
        remaining.append(f"steps {state.step + 1} to {config.num_steps}")
    if remaining:
        log.info(
            f"{begin} | {num_parameters:,} parameters | {ranks} "
            f"| {counted(config.data.num_lanes, 'lane')} of "
            f"{start.data.plan.lane_tokens:,} tokens per epoch | {', then '.join(remaining)}"
        )
    else:
        log.info(
            f"this run is finished: {state.step} of training.num_steps={config.num_steps} steps "
            "are done. To train it further: training.num_steps=MORE --allow-change "
            "training.num_steps"
        )
    if point is not None:
        log.info("%s", count_tokens(point.state.phases, state.phases[-1], position=state.position))
    if len(state.phases) > 1 or len(start.data.corpora) > 1:
        log.info("mixture | %s", " | ".join(map(str, realised_shares(state.phases[-1]))))
    _log_data(config, start.data)


def _computation(config: RunConfig, world: World) -> str:
    """`ZeRO stage 1 | bf16 | triton`."""
    model, stage = config.model, config.deepspeed.zero_stage
    attention = choose_implementation(model, world.device, with_dropout=model.dropatt > 0)
    is_gpu = world.device.type == "cuda"
    computed = config.deepspeed.computed_stage(num_ranks=world.num_ranks, on_gpu=is_gpu)
    replaced = "" if computed == stage else f" (on one GPU computed as stage {computed})"
    return f"ZeRO stage {stage}{replaced} | {config.precision} | {attention.name}"


def _log_data(config: RunConfig, data: TrainingData) -> None:
    """Log what is scored, and warn of settings and data that are probably not meant."""
    for warning in config.warnings:
        log.warning("settings | WARNING: %s", warning)
    shuffled = [c for c in data.corpora if c.manifest.settings.shuffle is not None]
    if config.data.reset == "stream" and shuffled:
        directories = " and ".join(str(corpus.directory) for corpus in shuffled)
        log.warning(
            "memory | WARNING: data.reset=stream continues the memory into the next document, "
            f"but {directories} was prepared with --shuffle, so that is an unrelated one. Prepare "
            "it without --shuffle, or set data.reset=document"
        )
    if config.evaluation.split is None:
        log.info("evaluation | none, because evaluation.split=null")
    elif data.evaluation is None:
        log.warning(
            "evaluation | WARNING: no evaluation, no score and no BEST checkpoint: no data of "
            f"this run has tokens in a split {DEFAULT_SPLIT!r}. Prepare data with --split "
            f"{DEFAULT_SPLIT}=0.01, or name another split: evaluation.split=NAME. For no "
            "evaluation: evaluation.split=null"
        )
    else:
        split, corpus = data.evaluation.name, data.evaluation.corpus
        limit = config.evaluation.max_tokens
        num_tokens = corpus.manifest.splits[split].tokens
        part = "" if limit is None else f"{min(limit, num_tokens):,} of "
        log.info(
            f"evaluation | {part}{num_tokens:,} tokens of split {split!r} of {corpus.directory} | "
            f"every {config.evaluation.interval_steps:,} steps and at the end"
            f"{' | scores the average of the weights' if config.optimizer.averaging else ''}"
        )


def _counters(state: TrainState) -> dict[str, float]:
    """Skipped steps and rollbacks of the whole run, unless there are none."""
    counters = {
        "skipped_steps": state.skipped_steps,
        "rollbacks": state.divergence.num_rollbacks,
    }
    return {name: count for name, count in counters.items() if count}


def step_line(step: int, values: dict[str, float]) -> str:
    """`step 1200 | loss 3.4120 | ppl 30.30 | tok/s 12,345 | eta 0:12:30 | ...`.

    The most important values come first, because a narrow terminal cuts the line off.
    """
    loss, perplexity, *others = in_lines(values)
    scores = "".join(f" | {other}" for other in others)
    return (
        f"step {step} | {loss} | {perplexity} | tok/s {values['tokens_per_second']:,.0f}"
        f" | eta {clock(math.ceil(values['seconds_left']))}"
        f"{scores} | lr {values['lr']:.2e} | grad {values['gradient_norm']:.3f}"
        f" | mfu {values['mfu']:.0%} | mem valid {values['memory_valid']:.0%}"
        f" | data wait {values['data_wait']:.1%}"
    )
