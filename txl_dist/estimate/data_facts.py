"""What an estimate needs to know of the data: vocabulary, length of the run, bytes per token."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from data_pipeline.shards.manifest import MANIFEST_NAME
from data_pipeline.system.remote_path import dataset_path
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.training.data import Corpus, first_phase, open_corpora


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Read from the datasets of a config or, if they do not exist, from the config alone."""

    vocab_size: int
    num_steps: int | None
    """`training.num_steps`; None: the run has a length in tokens."""
    num_tokens: float | None = None
    """Length of the run in tokens of all lanes; None: unknown without the data."""
    compressed_bytes_per_token: float | None = None
    """Compressed size of the training split's shards divided by its tokens."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Read the manifests of the datasets, if they are there.

        Raises ConfigError if the vocabulary is unknown, DataError for a damaged dataset.
        """
        steps, tokens = config.training.num_steps, config.training.num_tokens
        if not _is_prepared(config):
            if not config.model.vocab_size:
                paths = ", ".join(corpus.path for corpus in config.data.corpora.values())
                raise ConfigError(
                    f"model.vocab_size=0 means that of the data, but {paths} has no manifest. Add "
                    "model.vocab_size=N, or prepare the data first (txl prepare)"
                )
            return cls(vocab_size=config.model.vocab_size, num_steps=steps, num_tokens=tokens)
        corpora, data = open_corpora(config.data), config.data
        phase = first_phase(corpora, data.train_split, num_lanes=data.num_lanes)
        num_tokens: float | None = tokens
        if config.training.num_epochs is not None:
            num_tokens = config.training.num_epochs * phase.plan(tgt_len=data.tgt_len).num_tokens
        return cls(
            vocab_size=corpora[0].manifest.vocab_size,
            num_steps=steps,
            num_tokens=num_tokens,
            compressed_bytes_per_token=_bytes_per_token(corpora, data.train_split),
        )

    def steps_of_run(self, *, tokens_per_step: int) -> int | None:
        """Optimizer steps, with this many tokens per step."""
        if self.num_steps is not None or self.num_tokens is None:
            return self.num_steps
        return math.ceil(self.num_tokens / tokens_per_step)


def _is_prepared(config: RunConfig) -> bool:
    paths = [dataset_path(corpus.path) for corpus in config.data.corpora.values()]
    return all(not isinstance(path, Path) or (path / MANIFEST_NAME).exists() for path in paths)


def _bytes_per_token(corpora: tuple[Corpus, ...], split: str) -> float:
    """Averaged over the corpora by their weights."""
    total = 0.0
    for corpus in corpora:
        entry = corpus.manifest.split(split, corpus.directory)
        total += corpus.weight * entry.compressed_bytes / entry.tokens
    return total / sum(corpus.weight for corpus in corpora)
