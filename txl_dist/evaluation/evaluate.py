"""Evaluates one split: plans the chunks, scores them and adds their sums in a fixed order.

Two ways to score: on the ranks of a training run (`evaluate_on_ranks`), and in this process or on
workers (`distributed.py`). Both add the sums in the order of the chunks, so the result does not
depend on which worker scored which chunk.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.cursor import read_range
from txl_dist.errors import DataError
from txl_dist.evaluation.chunks import EvaluationChunk, overhead, plan_chunks
from txl_dist.evaluation.details import ScoreDetails
from txl_dist.evaluation.job import EvaluationJob, EvaluationSettings
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.evaluation.protocol import Subject, protocol_line
from txl_dist.evaluation.scored_text import ScoredText
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.world import World

__all__ = [
    "EvaluationJob",
    "EvaluationResult",
    "EvaluationSettings",
    "evaluate_on_ranks",
    "plan_evaluation",
    "summarise",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """A score and the settings that reproduce it."""

    sums: LossSums
    settings: EvaluationSettings
    num_chunks: int
    overhead: float
    """Context tokens as a fraction of the scored tokens."""
    text: ScoredText = field(default_factory=ScoredText)
    weights: str = "last"
    data: Subject | None = field(default=None, compare=False)
    model: Subject | None = field(default=None, compare=False)
    """None for the weights of a run that trains."""
    kernels: tuple[str, ...] = field(default=(), compare=False)
    """Attention functions and devices that computed the scores. They change the last digits only,
    and are not part of the score."""
    details: ScoreDetails | None = field(default=None, compare=False)

    @property
    def protocol(self) -> str:
        """One line to quote next to the score."""
        return protocol_line(
            self.settings,
            self.sums,
            self.text,
            data=self.data,
            model=self.model,
            weights=self.weights,
            kernels=self.kernels,
        )

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats per word); None if the words of the scored text are not known or there are none.

        Comparable across tokenizers. A word is defined by `ScoredText.num_words`.
        """
        if self.text.is_word_model:
            return self.sums.perplexity
        num_words = self.text.num_words
        return replace(self.sums, num_tokens=num_words).perplexity if num_words else None

    @property
    def num_bytes(self) -> float | None:
        """UTF-8 bytes of the scored text. None for a word model if the text is not known."""
        return self.text.num_bytes if self.text.is_word_model else self.sums.num_bytes

    @property
    def bits_per_byte(self) -> float | None:
        """None if the bytes are not known or there are none."""
        num_bytes = self.num_bytes
        return replace(self.sums, num_bytes=num_bytes).bits_per_byte if num_bytes else None

    @property
    def bits_per_character(self) -> float | None:
        """None if the characters of the scored text are not known or there are none."""
        counts = self.text.counts
        if counts is None or not counts.characters:
            return None
        return replace(self.sums, num_tokens=counts.characters).bits_per_token

    def to_json(self) -> dict[str, Any]:
        """The object that `txl eval --json` prints; a number too large for a float is null."""
        sums = self.sums
        return {
            "nats": sums.nats,
            "tokens_scored": sums.num_tokens,
            "bytes_scored": self.num_bytes,
            "nats_per_token": sums.nats_per_token,
            "perplexity": _in_range(sums.perplexity),
            "bits_per_token": sums.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
            "word_perplexity": _in_range(self.word_perplexity),
            **(
                {"not_counted": self.text.reason}
                if self.text.counts is None
                else {f"{name}_scored": count for name, count in self.text.counts}
            ),
            **asdict(self.settings),
            "num_chunks": self.num_chunks,
            "context_overhead": self.overhead,
            "data_sha256": self.data and self.data.digest,
            "model_sha256": self.model and self.model.digest,
            "protocol": self.protocol,
            **({} if self.details is None else {"details": self.details.to_json()}),
        }


def _in_range(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def plan_evaluation(
    source: TokenSource, settings: EvaluationSettings, model: ModelConfig
) -> list[EvaluationChunk]:
    """The chunks of a split for this model. Raises DataError if the split has no target.

    Mode `fast` has the context of a model of one layer, and is not exact.
    """
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

    reaching = replace(
        model,
        n_layer=model.n_layer if settings.mode == "exact" else 1,
        mem_len=settings.mem_len,
        same_length=settings.same_length,
    )
    return plan_chunks(
        num_targets=num_targets,
        tgt_len=settings.tgt_len,
        context_tokens=memory_kind(reaching).receptive_tokens(settings.tgt_len),
        document_start=document_start if settings.reset == "document" else None,
    )


def summarise(
    scores: Iterable[LossSums],
    chunks: list[EvaluationChunk],
    settings: EvaluationSettings,
    **facts: Any,
) -> EvaluationResult:
    """Add the sums of all chunks, which must be in the order of the chunks.

    `facts`: the fields of EvaluationResult that have defaults.
    """
    return EvaluationResult(
        sums=sum(scores, LossSums()),
        settings=settings,
        num_chunks=len(chunks),
        overhead=overhead(chunks),
        **facts,
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
