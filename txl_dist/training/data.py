"""TrainingData: the corpora of a run, opened and checked before any rank is started.

The data determines the vocabulary and so the size of the model, and which tokens each lane reads.
Shards are not read here, only manifests and the tokenizer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_pipeline.errors import counted
from data_pipeline.shards.manifest import (
    TOKENIZER_NAME,
    ShardManifest,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_reader import SplitReader, TokenSource, open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import MixedSource
from data_pipeline.system.remote_path import DatasetPath, dataset_path
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.loading import StoredTokenizer, differences
from txl_dist.config.data_config import TRAIN_SPLIT, DataConfig, lanes_for
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError, DataError
from txl_dist.model.config import ModelConfig
from txl_dist.training.phases import CorpusEntry, Phase, mixed_source

DEFAULT_SPLIT = "valid"
"""The split that `evaluation.split: auto` scores."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A dataset directory and its weight in the run's mixture."""

    name: str
    directory: DatasetPath
    weight: float
    manifest: ShardManifest

    @property
    def tokenizer(self) -> StoredTokenizer:
        return StoredTokenizer(self.directory / TOKENIZER_NAME, self.manifest.tokenizer_digest)

    def open(self, split: str) -> SplitReader:
        return open_split(self.directory, split, manifest=self.manifest)


@dataclass(frozen=True, slots=True)
class EvaluatedSplit:
    """The split that is scored during training."""

    corpus: Corpus
    name: str
    """Begins the names of its scores, such as `valid/loss`. The loss of training is `loss`."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The opened data of a run, and everything that follows from it."""

    corpora: tuple[Corpus, ...]
    evaluation: EvaluatedSplit | None
    tokenizer: Tokenizer
    phase: Phase
    """The phase of a run that starts with this data."""
    plan: LanePlan
    model_config: ModelConfig
    """With the vocabulary size of the data."""

    @classmethod
    def open(cls, config: RunConfig, *, num_ranks: int) -> "TrainingData":
        """Check everything that can be checked without reading shards.

        Raises DataError for data that is missing, damaged or prepared with different tokenizers,
        ConfigError for more ranks than lanes or a segment longer than a lane.
        """
        corpora = open_corpora(config.data)
        directory, manifest = corpora[0].directory, corpora[0].manifest
        tokenizer = open_tokenizer(directory, manifest)
        vocab_size = config.model.vocab_size or manifest.vocab_size
        # With `init_from`, the tokenizers are compared (origin.py, and compatibility.py at a
        # resume), which gives better advice.
        if config.init_from is None and vocab_size != manifest.vocab_size:
            raise DataError(
                f"model.vocab_size={vocab_size}, but {directory} was prepared with a tokenizer of "
                f"{manifest.vocab_size} ids (digest {manifest.tokenizer_digest}). Set data.path to "
                "the right data, or model.vocab_size=0 to take the data's vocabulary"
            )
        phase = first_phase(corpora, num_lanes=config.data.num_lanes)
        try:
            model_config = replace(config.model, vocab_size=manifest.vocab_size)
        except ValueError as error:
            raise ConfigError(f"model, with the vocabulary of {directory}: {error}") from None
        evaluation = _evaluation(config.evaluation.split, corpora)
        plan = phase.plan(tgt_len=config.data.tgt_len, num_turns=config.data.num_turns)
        if num_ranks > (rows := config.data.lanes_per_step or num_ranks):
            num_lanes = num_ranks * plan.num_turns
            raise ConfigError(
                f"{num_ranks} ranks for data.lanes_per_step={rows}: in every step each rank needs "
                f"a lane. Start at most {counted(rows, 'rank')}, or set for example "
                f"data.lanes_per_step={num_ranks} and data.num_lanes={num_lanes}"
            )
        plan.rows_per_rank(num_ranks)  # raises ConfigError for more ranks than lanes
        if plan.tgt_len > plan.lane_tokens:
            lanes, rows = lanes_for(plan.num_tokens, rows=config.data.rows, tgt_len=plan.tgt_len)
            take = f"take data.num_lanes={lanes} and data.lanes_per_step={rows}, "
            take = take if plan.tgt_len <= plan.num_tokens else ""  # one lane can be too short
            raise ConfigError(
                f"data.tgt_len={plan.tgt_len} is longer than a lane: the training data has "
                f"{plan.num_tokens:,} tokens, {plan.lane_tokens:,} for each of data.num_lanes="
                f"{plan.num_lanes}. Set data.tgt_len to at most {plan.lane_tokens}, {take}or "
                "prepare more text"
            )
        return cls(corpora, evaluation, tokenizer, phase, plan, model_config)

    @property
    def vocabulary(self) -> ShardManifest:
        """The manifest of the first corpus. All corpora have the same tokenizer."""
        return self.corpora[0].manifest

    @property
    def digest(self) -> str:
        """Digest of the dataset, or of the digests of all datasets of a mixture."""
        digests = [corpus.manifest.digest for corpus in self.corpora]
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def plan_of(self, phase: Phase) -> LanePlan:
        return phase.plan(tgt_len=self.plan.tgt_len, num_turns=self.plan.num_turns)

    def source_of(self, phase: Phase, config: RunConfig) -> TokenSource | MixedSource:
        """The tokens of a phase of these corpora. Raises DataError for damaged shard indexes."""
        sources = {corpus.manifest.digest: corpus.open(TRAIN_SPLIT) for corpus in self.corpora}
        return mixed_source(phase, sources, ordering=config.data.ordering, seed=config.seed)


def open_corpora(data: DataConfig) -> tuple[Corpus, ...]:
    """Open the corpora of a config.

    Raises DataError if two are the same, or if a token id has another meaning in one of them.
    """
    corpora = tuple(
        Corpus(name, dataset_path(entry.path), entry.weight, load_manifest(entry.path))
        for name, entry in data.corpora.items()
    )
    first, named = corpora[0], dict[str, Corpus]()
    for corpus in corpora:
        if changes := differences(first.tokenizer, corpus.tokenizer):
            raise DataError(
                f"corpora {first.name!r} ({first.directory}) and {corpus.name!r} "
                f"({corpus.directory}) do not fit together; their tokenizers differ: {changes}. "
                "Prepare the second with the first one's tokenizer: txl prepare INPUT --out "
                f"NEW_DIR --tokenizer {first.tokenizer.path}"
            )
        other = named.setdefault(corpus.manifest.digest, corpus)
        if other is not corpus:
            raise DataError(
                f"data.mixture.{other.name} ({other.directory}) and {corpus.name} "
                f"({corpus.directory}) are the same data. Name it once, with both weights added"
            )
    return corpora


def first_phase(corpora: Sequence[Corpus], *, num_lanes: int) -> Phase:
    """The phase of a run that starts with these corpora.

    Raises DataError for a corpus without tokens, ConfigError for weights so different that a corpus
    would get no token per epoch.
    """
    entries = []
    for each in corpora:
        tokens = each.manifest.split(TRAIN_SPLIT, each.directory).tokens
        if tokens == 0:
            raise DataError(
                f"{each.directory}: split {TRAIN_SPLIT!r} is empty; leave the corpus out"
            )
        digest = each.manifest.digest
        entries.append(
            CorpusEntry(name=each.name, digest=digest, tokens=tokens, weight=each.weight)
        )
    phase = Phase(corpora=tuple(entries), num_lanes=num_lanes)
    # Also raises ConfigError here, before any rank is started.
    assert sum(phase.tokens_per_epoch.values()) == phase.num_tokens
    return phase


def _evaluation(split: str | None, corpora: Sequence[Corpus]) -> EvaluatedSplit | None:
    """The split to score, of the first corpus that has it. Raises DataError if none has it."""
    if split is None:
        return None
    name = DEFAULT_SPLIT if split == "auto" else split
    candidates = [corpus for corpus in corpora if name in corpus.manifest.splits]
    if split == "auto":
        # A split of one token has no target.
        candidates = [c for c in candidates if c.manifest.splits[name].tokens > 1]
        if not candidates:
            return None
    corpus = next(iter(candidates), corpora[0])
    corpus.manifest.split(name, corpus.directory)  # raises DataError if it is missing
    return EvaluatedSplit(corpus, name)
