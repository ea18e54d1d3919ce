"""TrainingData: the corpora of a run, opened and checked before any rank is started."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from data_pipeline.shards.manifest import ShardManifest, load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import SplitReader, TokenSource, open_split
from data_pipeline.storage.remote_path import DatasetPath, dataset_path
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import CorpusTape, MixedSource
from data_pipeline.streams.order import Shuffle
from data_pipeline.tokenizers import Tokenizer
from txl_dist.config.run_config import DataConfig, RunConfig
from txl_dist.errors import ConfigError, DataError
from txl_dist.model.config import ModelConfig
from txl_dist.training.state import CorpusEntry, Phase

DEFAULT_SPLIT = "valid"
"""What `evaluation.split: auto` scores."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A dataset directory, as a part of the run's data."""

    name: str
    directory: DatasetPath
    weight: float
    manifest: ShardManifest

    def open(self, split: str) -> SplitReader:
        return open_split(self.directory, split, manifest=self.manifest)


@dataclass(frozen=True, slots=True)
class EvaluatedSplit:
    """What is scored during training."""

    corpus: Corpus
    name: str

    def open(self) -> SplitReader:
        return self.corpus.open(self.name)

    @property
    def num_tokens(self) -> int:
        return self.corpus.manifest.splits[self.name].tokens


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What the data decides: who reads what, the vocabulary, and so the model's size."""

    corpora: tuple[Corpus, ...]
    evaluation: EvaluatedSplit | None
    tokenizer: Tokenizer
    phase: Phase
    """What a run reads that starts now."""
    plan: LanePlan
    """Of that phase."""
    model_config: ModelConfig
    """The config's model with the data's vocabulary."""

    @classmethod
    def open(cls, config: RunConfig, *, num_ranks: int) -> "TrainingData":
        """Check everything that can be checked without reading shards.

        Raises DataError for missing, damaged or foreign data and corpora that do not fit together,
        ConfigError for more ranks than lanes or weights that cannot be meant.
        """
        corpora = open_corpora(config.data)
        where, manifest = corpora[0].directory, corpora[0].manifest
        tokenizer = open_tokenizer(where, manifest)
        vocab_size = config.model.vocab_size or manifest.vocab_size
        if vocab_size != manifest.vocab_size:
            raise DataError(
                f"model.vocab_size={vocab_size}, but {where} was prepared with a tokenizer of "
                f"{manifest.vocab_size} ids (digest {manifest.tokenizer_digest}). Set data.path to "
                "the right data, or model.vocab_size=0 to take the data's vocabulary"
            )
        num_tokens = [
            c.manifest.split(config.data.train_split, c.directory).tokens for c in corpora
        ]
        plan = LanePlan(
            num_tokens=sum(num_tokens),
            num_lanes=config.data.num_lanes,
            tgt_len=config.data.tgt_len,
        )
        plan.rows_per_rank(num_ranks)  # refuses more ranks than lanes
        _check_segment_length(plan)
        try:
            model_config = replace(config.model, vocab_size=manifest.vocab_size)
        except ValueError as error:
            raise ConfigError(f"model, with the vocabulary of {where}: {error}") from None
        evaluation = _evaluation(config, corpora)
        phase = first_phase(corpora, config.data.train_split)
        return cls(corpora, evaluation, tokenizer, phase, plan, model_config)

    @property
    def vocabulary(self) -> ShardManifest:
        """The manifest of the first corpus; all have its tokenizer."""
        return self.corpora[0].manifest

    @property
    def digest(self) -> str:
        """Of the only corpus, or of all digests."""
        digests = [corpus.manifest.digest for corpus in self.corpora]
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """Of everything that is read, by a name for messages; the same on all ranks of a run."""
        digests = {f"data {corpus.name}": corpus.manifest.digest for corpus in self.corpora}
        if self.evaluation is not None:
            digests["evaluation data"] = self.evaluation.corpus.manifest.digest
        return digests

    def plan_of(self, phase: Phase) -> LanePlan:
        """The lanes of a phase over these corpora."""
        return replace(self.plan, start=phase.position, first_epoch=phase.first_epoch)

    def source_of(self, phase: Phase, config: RunConfig) -> TokenSource | MixedSource:
        """What a phase over these corpora reads. Opens shard indexes, so DataError for bad ones."""
        split = config.data.train_split
        sources = {corpus.manifest.digest: corpus.open(split) for corpus in self.corpora}
        return mixed_source(phase, sources, shuffle=config.data.shuffle, seed=config.seed)


def _check_segment_length(plan: LanePlan) -> None:
    if plan.tgt_len > plan.lane_tokens:
        raise ConfigError(
            f"data.tgt_len={plan.tgt_len} is longer than a lane: the training data has "
            f"{plan.num_tokens:,} tokens, {plan.lane_tokens:,} for each of data.num_lanes="
            f"{plan.num_lanes}. Set data.tgt_len to at most {plan.lane_tokens}, lower "
            "data.num_lanes, or prepare more text"
        )


def mixed_source(
    phase: Phase, sources: Mapping[str, TokenSource], *, shuffle: Shuffle, seed: int
) -> TokenSource | MixedSource:
    """What a phase reads, from its corpora by digest; a single one is read as it is."""
    if len(phase.corpora) == 1:
        return sources[phase.corpora[0].digest]
    share = phase.tokens_per_epoch
    return MixedSource(
        [
            CorpusTape(
                sources[entry.digest],
                tokens_per_epoch=share[entry.name],
                shuffle=shuffle,
                seed=seed,
                key=int(entry.digest[:16], 16),
                start=entry.start,
                first_epoch=phase.first_epoch,
            )
            for entry in phase.corpora
        ]
    )


def open_corpora(data: DataConfig) -> tuple[Corpus, ...]:
    """The corpora a config names. Raises DataError for any that does not fit the first one."""
    corpora = tuple(
        Corpus(name, dataset_path(given.path), given.weight, load_manifest(given.path))
        for name, given in data.corpora.items()
    )
    for number, corpus in enumerate(corpora):
        _check_alike(corpora[0], corpus)
        for other in corpora[:number]:
            if other.manifest.digest == corpus.manifest.digest:
                raise DataError(
                    f"data.mixture.{other.name} ({other.directory}) and {corpus.name} "
                    f"({corpus.directory}) are the same data. Name it once, with both weights added"
                )
    return corpora


def _check_alike(first: Corpus, other: Corpus) -> None:
    """Token ids must mean the same in both."""
    for what in ("tokenizer_digest", "dtype", "end_of_document"):
        expected, found = getattr(first.manifest, what), getattr(other.manifest, what)
        if found != expected:
            raise DataError(
                f"corpora {first.name!r} ({first.directory}) and {other.name!r} "
                f"({other.directory}) do not fit together: {what} is {expected} in the first, "
                f"{found} in the second. Prepare the second with the first one's tokenizer: "
                f"txl prepare INPUT --out NEW_DIR --tokenizer {first.directory / 'tokenizer.json'}"
            )


def first_phase(corpora: Sequence[Corpus], split: str) -> Phase:
    """The phase of a run that starts with these corpora.

    Raises DataError for a corpus without tokens, ConfigError for weights that cannot be meant.
    """
    entries = []
    for corpus in corpora:
        tokens = corpus.manifest.split(split, corpus.directory).tokens
        if tokens == 0:
            raise DataError(f"{corpus.directory}: split {split!r} is empty; leave the corpus out")
        entries.append(
            CorpusEntry(
                name=corpus.name,
                digest=corpus.manifest.digest,
                tokens=tokens,
                weight=corpus.weight,
            )
        )
    phase = Phase(corpora=tuple(entries))
    assert sum(phase.tokens_per_epoch.values()) == phase.num_tokens
    return phase


def _evaluation(config: RunConfig, corpora: Sequence[Corpus]) -> EvaluatedSplit | None:
    """The split to score. Raises DataError if it is nowhere, or of other tokens."""
    split, path = config.evaluation.split, config.evaluation.path
    if split is None:
        return None
    name = DEFAULT_SPLIT if split == "auto" else split
    if path is not None:
        corpus = Corpus("evaluation.path", dataset_path(path), 1.0, load_manifest(path))
        _check_alike(corpora[0], corpus)
    else:
        having = [c for c in corpora if name in c.manifest.splits]
        if split == "auto":
            having = [c for c in having if c.manifest.splits[name].tokens > 1]
            if not having:
                return None
        corpus = having[0] if having else corpora[0]
    corpus.manifest.split(name, corpus.directory)  # refuses a missing split
    return EvaluatedSplit(corpus, name)
