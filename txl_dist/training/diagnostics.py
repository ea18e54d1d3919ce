"""Observers that explain a run: traces of steps, and whether the run learns.

`training.profile_steps` writes a trace of some steps by torch.profiler to RUN/profile:

    rank-0-step-100.json   for chrome://tracing or https://ui.perfetto.dev; one file for each part
                           of a range that a resume divides

A trace covers everything the rank does from the first of these steps to the last one: data, step,
report and checkpoints. Profiling slows these steps down; other steps are not affected.

`LearningCheck` warns of a run that has learned how frequent tokens are, and nothing from their
context. A post-norm model does so for the rest of the run if its learning rate is too high for its
warm-up: the loss stays at the unigram entropy of the data, a little lower at each evaluation.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.cursor import read_range
from txl_dist.config.data_config import TRAIN_SPLIT
from txl_dist.config.run_config import RunConfig
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.data import TrainingData
from txl_dist.training.observer import Observer, Values
from txl_dist.training.state import TrainState

MIN_TOKENS, MIN_STEPS, TOKENS_PER_ID = 250_000, 500, 100
"""No verdict before: healthy runs need some time too, more of it for a large vocabulary."""
CLEARLY_BELOW = 0.92
"""A loss below this part of the entropy is clearly below it. The parts of a text differ by a few
percent: a run that learned nothing ended at 0.95."""
SAMPLE_TOKENS, SAMPLE_RANGES = 1 << 22, 32
"""Of a larger split, this many tokens are read for the entropy, in evenly spaced ranges."""
AVERAGED = 0.2
"""Part of the tokens before the verdict whose losses are averaged."""

log = logging.getLogger(__name__)


class StepProfiler(Observer):
    """The trace of a rank. Call `close` at the end of the run."""

    def __init__(self, directory: Path, *, rank: int, first_step: int, last_step: int) -> None:
        self._directory, self._rank = directory, rank
        self._first_step, self._last_step = first_step, last_step
        self._path = directory
        self._profile: profile | None = None

    def segment(self, step: int) -> None:
        """Start before the first step of the range; write the files after the last one."""
        is_inside = self._first_step <= step <= self._last_step
        if is_inside and self._profile is None:
            self._path = self._directory / f"rank-{self._rank}-step-{step}.json"
            self._profile = profile(activities=_activities())
            self._profile.start()
        elif not is_inside:
            self.close()

    def close(self) -> None:
        """Stop and write the files, if a trace is being recorded."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        recorded.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            unfinished = self._path.with_suffix(".unfinished")
            recorded.export_chrome_trace(str(unfinished))
            unfinished.replace(self._path)
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            log.warning("the profile %s could not be written: %s", self._path, error)
        else:
            log.info("profile | %s", self._path)


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    return [*activities, ProfilerActivity.CUDA] if torch.cuda.is_available() else activities


@dataclass
class LearningCheck(Observer):
    """Compares the mean loss once, after `after_tokens` tokens, with the unigram entropy."""

    config: RunConfig
    entropy: float
    """Unigram entropy of the training data, in nats per token."""
    after_tokens: int
    is_done: bool = False
    _sums: LossSums = field(default_factory=LossSums)

    @classmethod
    def of(cls, config: RunConfig, data: TrainingData, state: TrainState) -> "LearningCheck | None":
        """The check of a run; None if the run is too short for a verdict. Reads a sample of tokens.

        `config` has a resolved duration. Raises DataError for damaged data.
        """
        after_tokens = tokens_before_check(config, vocab_size=data.vocabulary.vocab_size)
        if after_tokens is None:
            return None
        shares = state.phases[-1].shares
        entropy = unigram_entropy(
            [corpus.open(TRAIN_SPLIT) for corpus in data.corpora],
            [shares[corpus.name] for corpus in data.corpora],
            vocab_size=data.vocabulary.vocab_size,
        )
        return cls(config, entropy, after_tokens, is_done=state.tokens >= after_tokens)

    def start(self, state: TrainState) -> None:
        when = "" if self.is_done else f"; checked after {self.after_tokens:,} tokens"
        log.info(
            "learning | unigram entropy of the data %.3f nats: a model that learns from the "
            "context has a lower loss%s",
            self.entropy,
            when,
        )

    def report(self, state: TrainState, values: Values) -> None:
        if warning := self.warning(state.tokens, state.unreported_sums):
            log.warning("learning | WARNING: %s", warning)

    def warning(self, tokens: int, sums: LossSums) -> str | None:
        """The warning that is due with a line of `sums`, which ends after `tokens` of the run."""
        if self.is_done or tokens - sums.num_tokens < (1 - AVERAGED) * self.after_tokens:
            return None
        self._sums += sums
        self.is_done = tokens >= self.after_tokens
        loss, optimizer = self._sums.nats_per_token, self.config.optimizer
        if not self.is_done or loss < CLEARLY_BELOW * self.entropy:
            return None
        return (
            f"after {tokens:,} tokens the loss, {loss:.3f} nats, is not clearly below "
            f"{self.entropy:.3f}, the unigram entropy of the data: the model has learned how "
            "frequent tokens are, and nothing from their context. Start a new run with a longer "
            f"warm-up (optimizer.warmup_steps is {optimizer.warmup_steps}), a lower rate "
            f"(optimizer.lr is {optimizer.lr:g}) or gradient clipping at 0.25 "
            f"(optimizer.gradient_clipping is {optimizer.gradient_clipping:g}). "
            "Only tokens that do not depend on each other allow "
            "no lower loss"
        )


def tokens_before_check(config: RunConfig, *, vocab_size: int) -> int | None:
    """Tokens after which a run must have learned something; None: it is too short to say so."""
    data = config.data
    num_steps = max(MIN_STEPS, 2 * config.optimizer.warmup_steps)
    num_tokens = max(MIN_TOKENS, TOKENS_PER_ID * vocab_size, num_steps * data.tokens_per_step)
    # Shortly before the end of a shorter run: fewer targets are trained than tokens are read.
    num_tokens = min(num_tokens, config.tokens_after(0) * 9 // 10)
    return num_tokens if num_tokens >= MIN_TOKENS else None


def unigram_entropy(
    sources: Sequence[TokenSource], shares: Sequence[float], *, vocab_size: int
) -> float:
    """The entropy of the token frequencies, in nats per token.

    Source i gives the share `shares[i]` of all tokens; the shares add up to 1. Exact for sources
    of at most `SAMPLE_TOKENS`. A sample of a larger one misses rare tokens, so the result is
    slightly too low if the vocabulary is large.
    """
    frequency_V = np.zeros(vocab_size)
    for source, share in zip(sources, shares, strict=True):
        num_tokens, counts_V = int(source.block_tokens.sum()), np.zeros(vocab_size, np.int64)
        num_ranges = SAMPLE_RANGES if num_tokens > SAMPLE_TOKENS else 1
        range_tokens = min(num_tokens, SAMPLE_TOKENS) // num_ranges
        for start in np.linspace(0, num_tokens - range_tokens, num_ranges, dtype=np.int64):
            tokens, _ = read_range(source, int(start), int(start) + range_tokens)
            counts_V += np.bincount(tokens, minlength=vocab_size)
        frequency_V += share * counts_V / counts_V.sum()
    frequency_V = frequency_V[frequency_V > 0]
    return float(-(frequency_V * np.log(frequency_V)).sum())
