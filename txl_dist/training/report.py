"""The report of a run: `metrics.jsonl`, the step line and events, all written by rank 0.

Loss sums are collected in `TrainState.unreported` until a line is due. They are stored in the
checkpoint, so a resumed run writes the same lines as an uninterrupted one.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import EvaluationConfig
from txl_dist.evaluation.result import EvaluationResult
from txl_dist.evaluation.scores import LossSums
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.training.data import DEFAULT_SPLIT, EvaluatedSplit, TrainingData
from txl_dist.training.goodput import Goodput
from txl_dist.training.learning_check import LearningCheck
from txl_dist.training.phases import realised_shares
from txl_dist.training.state import TrainState
from txl_dist.training.stragglers import StragglerCheck
from txl_dist.training.utilisation import Utilisation

log = logging.getLogger(__name__)


class Report:
    """The report of ranks other than 0: measures and compares with the others, writes nothing."""

    def __init__(self, utilisation: Utilisation, stragglers: StragglerCheck) -> None:
        self._utilisation, self._stragglers = utilisation, stragglers

    @property
    def peak_is_due(self) -> bool:
        """Whether this rank would measure the peak FLOP/s after the next line."""
        return self._utilisation.is_due

    def measure_peak(self) -> None:
        """Measure the peak FLOP/s again. Collective."""
        start = time.monotonic()
        self._utilisation.measure()
        self.exclude(time.monotonic() - start)

    @property
    def comparison_is_due(self) -> bool:
        """Whether this rank would look for stragglers after the next line."""
        return self._stragglers.is_due

    def compare_ranks(self) -> None:
        """Log the slowest rank, if it is much slower than the others. Collective."""
        if line := self._stragglers.compare():
            self.event("stragglers | %s", line)

    def data_wait(self, seconds: float) -> None:
        """Called before each step: seconds until its segment was available."""

    def end_step(self, state: TrainState, *, is_computed: bool) -> None:
        """Called after each step. `is_computed`: False if a rollback has excluded it."""

    def evaluation_wait(self, seconds: float) -> None:
        """Called after each evaluation: seconds for which it blocked the loop."""

    def save_wait(self, state: TrainState, seconds: float) -> None:
        """Called after each checkpoint: seconds for which it blocked the loop."""

    def exclude(self, seconds: float) -> None:
        """Exclude other time than that of evaluations and saves from the training speed."""

    def step(
        self, state: TrainState, *, lr: float, gradient_norm: float, memory_valid: float
    ) -> None:
        """Write one line for the steps since the last one."""

    def without_loss(self, state: TrainState) -> None:
        """Write the counters of skipped steps and rollbacks; for a line without trained targets."""

    def rewind(self, state: TrainState, *, abandoned_step: int) -> None:
        """Remove all lines after `state`, to which a rollback has returned from a later step."""

    def statistics(self, state: TrainState, values: Mapping[str, float]) -> None:
        """Write the norms by layer of this step, if it has any."""

    def evaluation(self, result: EvaluationResult, *, step: int, tokens: int, gain: float) -> None:
        """Write the score of a split after `step`, which may be an earlier one.

        `gain`: nats per token below the best score before; 0 if it is not, or is the first.
        """

    def no_score(self, step: int, reason: str) -> None:
        """Log that a checkpoint was not scored."""

    def plan(self, config: RunConfig, data: TrainingData) -> None:
        """Log the loss to fall below, and which split is scored and when; warn about wrong data."""

    def phase(self, state: TrainState) -> None:
        """Log the corpora of the phase; if it begins now, write their shares as metrics. Does
        nothing for a run that has only ever read one corpus.
        """

    def event(self, message: str, *values: Any) -> None:
        """Write a line to the log."""

    def sync(self) -> None:
        """Flush all lines to disk. Call before a checkpoint, which assumes that they exist."""

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        """Write the summary of the run. `is_complete`: it has no steps left. `is_stopped`: a stop
        request has ended it.
        """


@dataclass(slots=True)
class Stopwatch:
    """Time since the last line. Monotonic, because the wall clock may jump."""

    start: float
    num_steps: int = 0
    """Steps that were computed. After a resume, fewer than those of the loss sums."""
    data_wait_seconds: float = 0.0
    excluded_seconds: float = 0.0
    save_wait_seconds: float = 0.0
    evaluation_wait_seconds: float = 0.0


class RankZeroReport(Report):
    """The report of rank 0, which writes."""

    def __init__(
        self,
        utilisation: Utilisation,
        stragglers: StragglerCheck,
        journal: MetricsJournal,
        goodput: Goodput,
        *,
        tokens_after: Callable[[int], int],
        scored: str | None = None,
        learning: LearningCheck | None = None,
    ) -> None:
        """`scored`: `EvaluatedSplit.label` of the split that is scored."""
        super().__init__(utilisation, stragglers)
        self._scored, self._learning = scored, learning
        self._journal, self._goodput = journal, goodput
        self._tokens_after = tokens_after
        """Function: step -> tokens of all later steps."""
        self._stopwatch = Stopwatch(time.monotonic())
        self._seconds = self._excluded_seconds = 0.0
        """From the start of training in this process to the last line."""

    def data_wait(self, seconds: float) -> None:
        if self._seconds == 0.0 and self._stopwatch.num_steps == 0:
            # What preceded the first step, such as an evaluation, is not expected again.
            self._stopwatch = Stopwatch(time.monotonic() - seconds)
        self._stopwatch.data_wait_seconds += seconds

    def end_step(self, state: TrainState, *, is_computed: bool) -> None:
        self._stopwatch.num_steps += is_computed
        self._goodput.update(state.step)

    def evaluation_wait(self, seconds: float) -> None:
        self._stopwatch.evaluation_wait_seconds += seconds
        self._stopwatch.excluded_seconds += seconds

    def save_wait(self, state: TrainState, seconds: float) -> None:
        self._stopwatch.save_wait_seconds += seconds
        self._stopwatch.excluded_seconds += seconds
        self._goodput.checkpoint(state.step)

    def exclude(self, seconds: float) -> None:
        self._stopwatch.excluded_seconds += seconds

    def step(
        self, state: TrainState, *, lr: float, gradient_norm: float, memory_valid: float
    ) -> None:
        stopwatch, end = self._stopwatch, time.monotonic()
        self._stopwatch = Stopwatch(end)
        sums = LossSums(*state.unreported)
        # After a resume the sums cover more steps than this process has timed, so the speed is
        # computed from its own steps.
        tokens_per_step = sums.num_tokens / state.unreported_steps
        # A clock of coarse resolution may show no time at all between two short steps.
        seconds = max(1e-9, end - stopwatch.start - stopwatch.excluded_seconds)
        steps_per_second = max(1, stopwatch.num_steps) / seconds
        values = {
            "loss": sums.nats_per_token,
            "perplexity": sums.perplexity,
            **({"bits_per_byte": sums.bits_per_byte} if sums.num_bytes else {}),
            "lr": lr,
            "gradient_norm": gradient_norm,
            "tokens_per_second": tokens_per_step * steps_per_second,
            "mfu": self._utilisation.share(steps_per_second=steps_per_second),
            "peak_flops": self._utilisation.peak_flops,
            "memory_valid": memory_valid,
            "data_wait": stopwatch.data_wait_seconds / seconds,
            # Of all the time, because they are excluded from `seconds`.
            "save_wait": stopwatch.save_wait_seconds / max(1e-9, end - stopwatch.start),
            "evaluation_wait": stopwatch.evaluation_wait_seconds / max(1e-9, end - stopwatch.start),
            **self._goodput.values(),
            **_counters(state),
        }
        self._write(state, values)
        self._seconds += end - stopwatch.start
        self._excluded_seconds += stopwatch.excluded_seconds
        # Evaluations and saves are expected to take the same share of time as until now.
        step_share = max(1e-9, 1 - self._excluded_seconds / max(1e-9, self._seconds))
        eta_seconds = self._tokens_after(state.step) / values["tokens_per_second"] / step_share
        log.info("%s", step_line(state.step, values, eta_seconds=eta_seconds))
        if self._learning and (warning := self._learning.warning(state.tokens, sums)):
            log.warning("learning | WARNING: %s", warning)

    def without_loss(self, state: TrainState) -> None:
        if counters := _counters(state):
            self._write(state, counters)

    def rewind(self, state: TrainState, *, abandoned_step: int) -> None:
        self._journal.sync()
        self._journal.truncate_after(state.step, redone=redone_metrics(state, self._scored))
        self._goodput.update(abandoned_step)
        self._goodput.rewind(state.step)
        self._stopwatch = Stopwatch(time.monotonic())

    def statistics(self, state: TrainState, values: Mapping[str, float]) -> None:
        if values:
            self._write(state, dict(values))

    def evaluation(self, result: EvaluationResult, *, step: int, tokens: int, gain: float) -> None:
        sums, scored = result.sums, self._scored
        values = {
            f"{scored}/loss": sums.nats_per_token,
            f"{scored}/perplexity": sums.perplexity,
            f"{scored}/tokens_scored": sums.num_tokens,
        }
        if sums.num_bytes:
            values[f"{scored}/bits_per_byte"] = sums.bits_per_byte
        self._journal.write({"step": step, "tokens": tokens, "time": time.time(), **values})
        per_byte = f" | bits per byte {sums.bits_per_byte:.4f}" if sums.num_bytes else ""
        comment = f" | best so far, by {gain:.2g}" if gain else ""
        if self._learning and not self._learning.is_learned(sums.nats_per_token):
            comment += f" | not clearly below the unigram entropy {self._learning.entropy:.3f}"
        log.info(
            "evaluation at step %d | %s loss %.4f | ppl %.2f%s | %s targets%s",
            step,
            scored,
            sums.nats_per_token,
            sums.perplexity,
            per_byte,
            f"{sums.num_tokens:,}",
            comment,
        )

    def no_score(self, step: int, reason: str) -> None:
        log.warning("evaluation at step %d | WARNING: no score: %s", step, reason)

    def plan(self, config: RunConfig, data: TrainingData) -> None:
        if self._learning:
            log.info("learning | %s", self._learning.line)
        shuffled = [c for c in data.corpora if c.manifest.settings.shuffle is not None]
        if config.data.reset == "stream" and shuffled:
            log.warning(
                "memory | WARNING: data.reset=stream continues the memory into the next document, "
                "but %s was prepared with --shuffle, so that is an unrelated one. Prepare it "
                "without --shuffle, or set data.reset=document",
                " and ".join(str(corpus.directory) for corpus in shuffled),
            )
        self._evaluation_plan(config.evaluation, data)

    def _evaluation_plan(self, config: EvaluationConfig, data: TrainingData) -> None:
        if config.split is None:
            log.info("evaluation | none, because evaluation.split=null")
        elif data.evaluation is None:
            log.warning(
                "evaluation | WARNING: no evaluation, no score and no BEST checkpoint: no data of "
                "this run has tokens in a split %r. Prepare data with --split %s=0.01, or name "
                "another split: evaluation.split=NAME. For no evaluation: evaluation.split=null",
                DEFAULT_SPLIT,
                DEFAULT_SPLIT,
            )
        else:
            log.info("evaluation | %s", evaluation_line(config, data.evaluation))

    def phase(self, state: TrainState) -> None:
        phase = state.phases[-1]
        if len(state.phases) == len(phase.corpora) == 1:
            return
        shares = realised_shares(phase)
        log.info("mixture | %s", " | ".join(share.line for share in shares))
        if phase.position == state.position:
            values = {f"mixture/{share.name}": share.share for share in shares}
            # With the number of the next step: a resume from here removes that step's lines and
            # writes them again. Without `tokens`, which MLflow stores once per step: those of the
            # next step are not trained yet.
            self._journal.write({"step": state.step + 1, "time": time.time(), **values})

    def event(self, message: str, *values: Any) -> None:
        log.info(message, *values)

    def sync(self) -> None:
        self._journal.sync()

    def end(self, state: TrainState, *, is_complete: bool, is_stopped: bool) -> None:
        summary = self._goodput.end(state.step, is_complete=is_complete, is_stopped=is_stopped)
        if summary:
            log.info("%s", summary)

    def _write(self, state: TrainState, values: dict[str, float]) -> None:
        self._journal.write(
            {"step": state.step, "tokens": state.tokens, "time": time.time(), **values}
        )


def redone_metrics(state: TrainState, scored: str | None) -> dict[int, str]:
    """The metrics of the evaluations that a run at `state` still has to do, by step."""
    # A process killed after writing a score to the journal, but before saving it, left them.
    return {} if scored is None else dict.fromkeys(state.missing_scores, f"{scored}/loss")


def _counters(state: TrainState) -> dict[str, float]:
    """Skipped steps and rollbacks of the whole run, unless there are none."""
    counters = {
        "skipped_steps": state.skipped_steps,
        "rollbacks": state.divergence.num_rollbacks,
    }
    return {name: count for name, count in counters.items() if count}


def evaluation_line(config: EvaluationConfig, evaluated: EvaluatedSplit) -> str:
    """`split 'valid' of data/web (24,576 tokens) | every 500 steps and at the end`."""
    text = f"split {evaluated.name!r} of {evaluated.corpus.directory}"
    if config.max_tokens is not None and config.max_tokens < evaluated.num_tokens:
        text = f"the first {config.max_tokens:,} tokens of {text}"
    else:
        text = f"{text} ({evaluated.num_tokens:,} tokens)"
    where = " | by a worker, from checkpoints" if config.on == "workers" else ""
    return f"{text} | every {config.interval_steps:,} steps and at the end{where}"


def step_line(step: int, values: dict[str, float], *, eta_seconds: float) -> str:
    """`step 1200 | loss 3.4120 | ppl 30.30 | tok/s 12,345 | eta 0:12:30 | ...`.

    The most important values come first, because a narrow terminal cuts the line off.
    """
    bits = f" | bpb {values['bits_per_byte']:.3f}" if "bits_per_byte" in values else ""
    minutes, seconds = divmod(math.ceil(eta_seconds), 60)
    return (
        f"step {step} | loss {values['loss']:.4f} | ppl {values['perplexity']:.2f}"
        f" | tok/s {values['tokens_per_second']:,.0f}"
        f" | eta {minutes // 60}:{minutes % 60:02}:{seconds:02}"
        f"{bits} | lr {values['lr']:.2e} | grad {values['gradient_norm']:.3f}"
        f" | mfu {values['mfu']:.0%} | mem valid {values['memory_valid']:.0%}"
        f" | data wait {values['data_wait']:.1%}"
    )
