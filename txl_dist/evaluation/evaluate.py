"""Evaluates one split: plans the chunks, scores them and adds their sums in a fixed order.

Two ways to score: on the ranks of a training run (`evaluate_on_ranks`), and in this process or on
workers (`distributed.py`). Both add the sums in the order of the chunks, so the result does not
depend on which worker scored which chunk.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import TokenSource, open_split
from data_pipeline.storage.remote_path import DatasetPath
from data_pipeline.streams.cursor import read_range
from data_pipeline.streams.segments import Reset
from txl_dist.checkpoint.reader import Weights
from txl_dist.config.run_config import Precision
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import DataError
from txl_dist.evaluation.chunks import EvaluationChunk, Mode, overhead, plan_chunks
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.config import ModelConfig
from txl_dist.runtime.allocation import keep_freed_memory
from txl_dist.runtime.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """Everything that determines the score, except the weights and the text."""

    split: str
    mode: Mode
    tgt_len: int
    mem_len: int
    clamp_len: int | None
    same_length: bool
    reset: Reset
    precision: Precision = "fp32"
    max_tokens: int | None = None
    """Use only this many tokens from the start of the split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """A score and the settings that reproduce it."""

    sums: LossSums
    settings: EvaluationSettings
    num_chunks: int
    overhead: float
    """Context tokens as a fraction of the scored tokens."""

    def to_json(self) -> dict[str, Any]:
        """The object that `txl eval --json` prints."""
        sums = self.sums
        return {
            "nats": sums.nats,
            "tokens_scored": sums.num_tokens,
            "bytes_scored": sums.num_bytes,
            "nats_per_token": sums.nats_per_token,
            "perplexity": sums.perplexity,
            "bits_per_token": sums.bits_per_token,
            "bits_per_byte": sums.bits_per_byte if sums.num_bytes else None,
            **asdict(self.settings),
            "num_chunks": self.num_chunks,
            "context_overhead": self.overhead,
        }


def plan_evaluation(
    source: TokenSource, settings: EvaluationSettings, *, n_layer: int
) -> list[EvaluationChunk]:
    """The chunks of a split. Raises DataError if it has no target."""
    num_tokens = int(source.block_tokens.sum())
    num_targets = min(num_tokens, settings.max_tokens or num_tokens) - 1
    if num_targets < 1:
        raise DataError(
            f"split {settings.split} holds {num_tokens} tokens; scoring needs at least 2. Prepare "
            f"more text, or give it a larger share: txl prepare ... --split {settings.split}=0.1"
        )

    # Called once per chunk, so that the ages of the whole split are never in memory.
    def document_start(position: int) -> int:
        _, age = read_range(source, position, position + 1)
        return position - int(age[0])

    return plan_chunks(
        num_targets=num_targets,
        tgt_len=settings.tgt_len,
        mem_len=settings.mem_len,
        n_layer=n_layer,
        mode=settings.mode,
        document_start=document_start if settings.reset == "document" else None,
    )


def summarise(
    scores: Iterable[LossSums], chunks: list[EvaluationChunk], settings: EvaluationSettings
) -> EvaluationResult:
    """Add the sums of all chunks, which must be in the order of the chunks."""
    return EvaluationResult(
        sums=sum(scores, LossSums()),
        settings=settings,
        num_chunks=len(chunks),
        overhead=overhead(chunks),
    )


def evaluate_on_ranks(
    scorer: Scorer,
    chunks: list[EvaluationChunk],
    settings: EvaluationSettings,
    *,
    world: World,
    stop: object = False,
) -> EvaluationResult | None:
    """Collective: every rank scores its chunks, and every rank returns the whole result.

    If `stop` becomes true on any rank, that rank stops scoring and all ranks return None.
    """
    indices = range(world.rank, len(chunks), world.num_ranks)
    scored = list(scorer.scores([chunks[i] for i in indices], stop=stop))
    # One all-reduce: each chunk has its own row, so adding zeros keeps every sum bit for bit. The
    # last row counts the chunks that a stop left unscored.
    table = torch.zeros(len(chunks) + 1, 3, dtype=torch.float64)
    for index, sums in zip(indices, scored, strict=False):
        table[index] = torch.tensor([sums.nats, sums.num_tokens, sums.num_bytes], dtype=table.dtype)
    table[-1, 0] = len(indices) - len(scored)
    *rows, (num_unscored, _, _) = world.all_reduce_sum(table).tolist()
    if num_unscored:
        return None
    scores = [LossSums(nats, int(tokens), int(size)) for nats, tokens, size in rows]
    return summarise(scores, chunks, settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationJob:
    """What a worker needs to score chunks: paths and settings. Can be sent to another process."""

    checkpoint: Path
    """A checkpoint or the directory of an exported model."""
    data: DatasetPath
    settings: EvaluationSettings
    batch_chunks: int
    weights: Weights = "auto"
    num_ranks: int = 1
    """The chunks are divided into batches as `evaluate_on_ranks` does it on this many ranks: the
    composition of a batch may change the last bit of a sum."""
    digest: str = ""
    """Of the model; set by `plan_job`. The path may have another model later."""

    def model_config(self, trained: ModelConfig) -> ModelConfig:
        """The trained architecture with the memory options of this evaluation.

        Raises ValueError for a combination that the model does not support.
        """
        settings = self.settings
        if trained.encoding.needs_clamp_len and settings.clamp_len != trained.clamp_len:
            raise ValueError(
                f"clamp_len={settings.clamp_len}, but the model has learned a vector for each "
                f"distance up to {trained.clamp_len}; leave clamp_len as trained"
            )
        return replace(
            trained,
            mem_len=settings.mem_len,
            clamp_len=settings.clamp_len,
            same_length=settings.same_length,
        )

    def open(self) -> Scorer:
        """Load model and split. Raises CheckpointError; DataError if the tokenizers differ."""
        keep_freed_memory()
        # The tokenizer of the dataset serves models without one; check_data has compared the sizes.
        trained = find_model(self.checkpoint, weights=self.weights)
        manifest = load_manifest(self.data)
        trained.check_data(manifest, self.data)
        model, tokenizer = trained.load(self.model_config(trained.config))
        tokenizer = tokenizer or open_tokenizer(self.data, manifest)
        return Scorer(
            model=model.to("cuda" if torch.cuda.is_available() else "cpu"),
            source=open_split(self.data, self.settings.split, manifest=manifest),
            tgt_len=self.settings.tgt_len,
            reset=self.settings.reset,
            precision=self.settings.precision,
            batch_chunks=self.batch_chunks,
            byte_counts_V=torch.from_numpy(tokenizer.token_bytes()),
        )
