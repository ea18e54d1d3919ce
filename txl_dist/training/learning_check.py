"""Notices a run that has learned how frequent tokens are, and nothing from their context.

A post-norm model does so for the rest of the run if its learning rate is too high for its warm-up:
the loss stays at the unigram entropy of the data, a little lower at each evaluation.
"""

from dataclasses import dataclass, field

from txl_dist.config.run_config import RunConfig
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.data import TrainingData
from txl_dist.training.state import TrainState

MIN_TOKENS, MIN_STEPS, TOKENS_PER_ID = 250_000, 500, 100
"""No verdict before: healthy runs need some time too, more of it for a large vocabulary."""
CLEARLY_BELOW = 0.92
"""A loss below this part of the entropy is clearly below it. The parts of a text differ by a few
percent: a run that learned nothing ended at 0.95."""
AVERAGED = 0.2
"""Part of the tokens before the verdict whose losses are averaged."""


@dataclass
class LearningCheck:
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
        entropy = data.unigram_entropy(state.phases[-1], config.data.train_split)
        return cls(config, entropy, after_tokens, is_done=state.tokens >= after_tokens)

    @property
    def line(self) -> str:
        when = "" if self.is_done else f"; checked after {self.after_tokens:,} tokens"
        return (
            f"unigram entropy of the data {self.entropy:.3f} nats: a model that learns from the "
            f"context has a lower loss{when}"
        )

    def is_learned(self, loss: float) -> bool:
        """Whether a loss, in nats per token, needs more than the frequencies of tokens."""
        return loss < CLEARLY_BELOW * self.entropy

    def warning(self, tokens: int, sums: LossSums) -> str | None:
        """The warning that is due with a line of `sums`, which ends after `tokens` of the run."""
        if self.is_done or tokens - sums.num_tokens < (1 - AVERAGED) * self.after_tokens:
            return None
        self._sums += sums
        self.is_done = tokens >= self.after_tokens
        loss, optimizer = self._sums.nats_per_token, self.config.optimizer
        if not self.is_done or self.is_learned(loss):
            return None
        return (
            f"after {tokens:,} tokens the loss, {loss:.3f} nats, is not clearly below "
            f"{self.entropy:.3f}, the unigram entropy of the data: the model has learned how "
            "frequent tokens are, and nothing from their context. Start a new run with a longer "
            f"warm-up (optimizer.warmup_steps is {optimizer.warmup_steps}), a lower rate "
            f"(optimizer.lr is {optimizer.lr:g}) or gradient clipping at 0.25 "
            f"(optimizer.gradient_clipping is {optimizer.gradient_clipping:g}); see "
            "docs/how_to/choose_settings.md. Only tokens that do not depend on each other allow "
            "no lower loss"
        )


def tokens_before_check(config: RunConfig, *, vocab_size: int) -> int | None:
    """Tokens after which a run must have learned something; None: it is too short to say so."""
    data = config.data
    num_steps = max(MIN_STEPS, 2 * config.optimizer.warmup_steps)
    num_tokens = max(
        MIN_TOKENS, TOKENS_PER_ID * vocab_size, num_steps * data.num_lanes * data.tgt_len
    )
    # Shortly before the end of a shorter run: fewer targets are trained than tokens are read.
    num_tokens = min(num_tokens, config.tokens_after(0) * 9 // 10)
    return num_tokens if num_tokens >= MIN_TOKENS else None
