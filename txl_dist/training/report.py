"""What a run says of itself: the step line, `metrics.jsonl`, and events, from rank 0.

Sums collect in `unreported` until a line is due, and travel with the checkpoint; so the lines of a
resumed run are those of a run that was never stopped.
"""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from txl_dist.checkpoint.manifest import TrainState
from txl_dist.config.run_config import EvaluationConfig
from txl_dist.evaluation.evaluate import EvaluationResult
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.training.data import DEFAULT_SPLIT, EvaluatedSplit, TrainingData
from txl_dist.training.phases import realised_shares
from txl_dist.training.utilisation import Utilisation

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Stopwatch:
    """Where the time since the last line went. Monotonic: the wall clock may jump."""

    since: float
    num_steps: int = 0
    """Less than the sums cover, on the first line after a resume."""
    data_wait_seconds: float = 0.0
    other_seconds: float = 0.0
    """Evaluation and checkpoints: not part of the training speed."""


class Report:
    """Writes lines; only rank 0 has a journal, other ranks stay silent."""

    def __init__(
        self, journal: MetricsJournal | None, *, num_steps: int, utilisation: Utilisation
    ) -> None:
        self._journal = journal
        self._num_steps = num_steps
        self._utilisation = utilisation
        self._watch = Stopwatch(time.monotonic())

    def waited(self, seconds: float) -> None:
        """Once a step: how long its segment took to come."""
        self._watch.num_steps += 1
        self._watch.data_wait_seconds += seconds

    def not_training(self, seconds: float) -> None:
        self._watch.other_seconds += seconds

    @property
    def peak_is_due(self) -> bool:
        """Whether this rank would measure the machine's peak after the next line."""
        return self._utilisation.is_due

    def measure_peak(self) -> None:
        """Measure the machine's peak again; called by all ranks at the same step."""
        began = time.monotonic()
        self._utilisation.measure()
        self.not_training(time.monotonic() - began)

    def step(
        self, state: TrainState, *, lr: float, gradient_norm: float, memory_valid: float
    ) -> None:
        """One line for the steps since the last one."""
        watch, now = self._watch, time.monotonic()
        self._watch = Stopwatch(now)
        if self._journal is None:
            return
        sums = LossSums(*state.unreported)
        tokens_per_step = sums.num_tokens / state.unreported_steps
        seconds = max(1e-9, now - watch.since - watch.other_seconds)
        steps_per_second = watch.num_steps / seconds
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
            "data_wait": watch.data_wait_seconds / seconds,
        }
        self._write(state, values)
        left = (self._num_steps - state.step) * tokens_per_step / values["tokens_per_second"]
        log.info("%s", step_line(state.step, values, eta_seconds=left))

    def evaluation(self, state: TrainState, result: EvaluationResult, *, improved: bool) -> None:
        """The score of a split during training."""
        if self._journal is None:
            return
        sums, split = result.sums, result.settings.split
        values = {
            f"{split}/loss": sums.nats_per_token,
            f"{split}/perplexity": sums.perplexity,
            f"{split}/tokens_scored": sums.num_tokens,
        }
        if sums.num_bytes:
            values[f"{split}/bits_per_byte"] = sums.bits_per_byte
        self._write(state, values)
        per_byte = f" | bits per byte {sums.bits_per_byte:.4f}" if sums.num_bytes else ""
        log.info(
            "evaluation at step %d | %s loss %.4f | ppl %.2f%s | %s targets%s",
            state.step,
            split,
            sums.nats_per_token,
            sums.perplexity,
            per_byte,
            f"{sums.num_tokens:,}",
            " | best so far" if improved else "",
        )

    def evaluation_plan(self, config: EvaluationConfig, data: TrainingData) -> None:
        """What will be scored and when; a warning where nothing can be."""
        if self._journal is None:
            return
        if config.split is None:
            log.info("evaluation | none, as evaluation.split=null says")
        elif data.evaluation is None:
            log.warning(
                "evaluation | WARNING: no evaluation, no score and no BEST checkpoint: no data of "
                "this run has tokens in a split %r. Prepare data with --split %s=0.01, or name "
                "another split with evaluation.split=NAME (evaluation.split=null: none is wanted)",
                DEFAULT_SPLIT,
                DEFAULT_SPLIT,
            )
        else:
            log.info("evaluation | %s", evaluation_line(config, data.evaluation))

    def phase(self, state: TrainState, *, is_new: bool) -> None:
        """What is read from here on; shares go to the metrics of a new phase's first step."""
        if self._journal is None:
            return
        shares = realised_shares(state.phases[-1])
        log.info("mixture | %s", " | ".join(share.line for share in shares))
        if is_new:
            values = {f"mixture/{share.name}": share.share for share in shares}
            # Of the step to come: a resume from here takes the line out and writes it again.
            self._write(state.model_copy(update={"step": state.step + 1}), values)

    def event(self, message: str, *values: Any) -> None:
        """A line in the log, from rank 0."""
        if self._journal is not None:
            log.info(message, *values)

    def sync(self) -> None:
        """Put every line so far on disk, before a checkpoint that counts on them."""
        if self._journal is not None:
            self._journal.sync()

    def _write(self, state: TrainState, values: dict[str, float]) -> None:
        assert self._journal is not None
        self._journal.write(
            {"step": state.step, "tokens": state.tokens, "time": time.time(), **values}
        )


def evaluation_line(config: EvaluationConfig, evaluated: EvaluatedSplit) -> str:
    """`split 'valid' of data/web (24,576 tokens) | every 500 steps and at the end`."""
    where = f"split {evaluated.name!r} of {evaluated.corpus.directory}"
    if config.max_tokens is not None and config.max_tokens < evaluated.num_tokens:
        what = f"the first {config.max_tokens:,} tokens of {where}"
    else:
        what = f"{where} ({evaluated.num_tokens:,} tokens)"
    return f"{what} | every {config.interval_steps:,} steps and at the end"


def step_line(step: int, values: dict[str, float], *, eta_seconds: float) -> str:
    """`step 1200 | loss 3.4120 | ppl 30.30 | tok/s 12,345 | eta 0:12:30 | ...`.

    What people look for comes first: a narrow terminal shows the beginning only.
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
