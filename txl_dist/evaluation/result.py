"""The result of an evaluation: sums of all chunks, the scored text, and the protocol line.

The protocol line has everything that a reader must know to compare a score:

split test of wt103 (sha256 0f3c96a1b2d4), model wt103-base/step-00200000 (sha256 91d0a7c3e5f2),
245,568 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400, same_length true,
reset stream, weights last, fp32, sdpa on cpu, word = ...

The text is counted in units that do not depend on the tokenizer. The manifest has the counts of
each split. The first token of a split has no loss, so its text is subtracted; in most datasets it
is an end-of-document token, which has no text.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from data_pipeline.shards.manifest import ShardManifest, TextCounts, count_text, open_tokenizer
from data_pipeline.shards.shard_reader import SplitReader, TokenSource
from data_pipeline.streams.cursor import read_range
from data_pipeline.tokenizers.byte_char_word import WordTokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from txl_dist.errors import DataError
from txl_dist.evaluation.breakdown import Breakdown, details_to_json, in_range
from txl_dist.evaluation.job import EvaluationSettings
from txl_dist.evaluation.scores import LossSums, finish
from txl_dist.evaluation.scoring import EvaluationChunk, plan_chunks
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind

SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Subject:
    """What a number depends on, a dataset or a model: its name and its digest."""

    name: str
    digest: str
    """Hex sha256: of a dataset its manifest, of a model its architecture and weights."""

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.digest[:SHOWN_DIGITS]})"


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The counts of the scored text, or why there are none."""

    counts: TextCounts | None = None
    reason: str = "the text was not counted"
    """Used if `counts` is None."""
    document_ends: int = 0
    """End-of-document tokens that were scored."""
    is_word_model: bool = False
    """Every token is a word, the mark of a line or the end of a document."""
    num_bytes: int | None = None
    """UTF-8 bytes of the text. Most tokenizers normalize it, so their tokens do not tell it."""

    def counted(self, sums: LossSums) -> LossSums:
        """The sums of this text with its bytes, if they are known."""
        return sums if self.num_bytes is None else replace(sums, num_bytes=self.num_bytes)

    @property
    def num_words(self) -> int | None:
        """What a word model predicts: words, line ends (`<eos>`) and document ends."""
        if self.counts is None:
            return None
        return self.counts.words + self.counts.line_ends + self.document_ends

    @property
    def definition_of_a_word(self) -> str:
        """What the protocol line says about words."""
        if self.is_word_model:
            return "word = token of the model: a word, the mark of a line or a document end"
        if self.counts is None:
            return f"words not counted ({self.reason})"
        return (
            f"word = whitespace-separated word ({self.counts.words:,}), line end "
            f"({self.counts.line_ends:,}) or document end ({self.document_ends:,}) of the text as "
            "prepared, not detokenized"
        )


def scored_text(source: SplitReader, *, max_tokens: int | None = None) -> ScoredText:
    """The text of a split whose targets are all scored; unknown for a part of a split."""
    manifest: ShardManifest = source.manifest
    tokenizer = open_tokenizer(source.directory, manifest)
    is_word_model = isinstance(tokenizer, WordTokenizer)
    reason = ""
    if isinstance(tokenizer, IdTokenizer):
        reason = "the dataset was prepared from token ids, which have no text"
    elif max_tokens is not None and max_tokens < source.num_tokens:
        reason = f"only the first {max_tokens:,} tokens of the split were scored"
    if reason:
        return ScoredText(reason=reason, is_word_model=is_word_model)
    document_ends = source.entry.documents if tokenizer.opens_documents else 0
    counts, num_bytes = source.entry.text_counts, source.entry.text_bytes
    first = source.read(0, 0, 1)
    if int(first[0]) == manifest.end_of_document:
        document_ends -= 1
    else:
        text = tokenizer.decode(first)
        counts -= count_text(text)
        num_bytes -= len(text.encode())
    return ScoredText(
        counts,
        document_ends=document_ends,
        is_word_model=is_word_model,
        num_bytes=num_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """A score and the settings that reproduce it."""

    sums: LossSums
    settings: EvaluationSettings
    num_chunks: int
    overhead: float
    """Context tokens as a fraction of the scored tokens."""
    text: ScoredText
    weights: str
    data: Subject = field(compare=False)
    model: Subject = field(compare=False)
    kernels: tuple[str, ...] = field(compare=False)
    """Attention functions and devices that computed the scores. They change the last digits only,
    and are not part of the score."""
    breakdown: Breakdown | None = field(default=None, compare=False)
    """None without details."""
    counted_split: str | None = field(default=None, compare=False)
    """The split whose token frequencies are used for the details."""
    memory: str = "recurrent"
    """`model.memory`."""
    context_tokens: int | None = 0
    """Tokens before a segment that determine its memory; None: there is no limit, so only whole
    documents, or else the whole split, can be scored independently."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", self.text.counted(self.sums))

    @property
    def protocol(self) -> str:
        """One line to quote next to the score."""
        settings = self.settings
        parts = [
            f"{self._part}split {settings.split} of {self.data}",
            f"model {self.model}",
            f"{self.sums.num_tokens:,} tokens scored",
            f"mode {settings.mode}",
            f"tgt_len {settings.tgt_len}",
            *([f"memory {self.memory}"] if self.memory != "recurrent" else ()),
            f"mem_len {settings.mem_len}",
            f"clamp_len {'none' if settings.clamp_len is None else settings.clamp_len}",
            f"same_length {str(settings.same_length).lower()}",
            f"reset {settings.reset}",
            f"weights {self.weights}",
            settings.precision,
            " and ".join(self.kernels),
            self.text.definition_of_a_word,
        ]
        return ", ".join(parts)

    @property
    def _part(self) -> str:
        max_tokens = self.settings.max_tokens
        is_part = max_tokens is not None and self.sums.num_tokens == max_tokens - 1
        return f"first {max_tokens:,} tokens of " if is_part else ""

    @property
    def named_sums(self) -> dict[str, float]:
        """The sums of the whole text; those that are not known are missing."""
        text, sums = self.text, self.sums.named
        if text.counts is not None:
            sums["characters"] = text.counts.characters
        if text.is_word_model:
            sums["words"] = sums["tokens"]
        # The words of a model of bytes or characters are so improbable that their perplexity, of
        # 15 digits and more, says nothing.
        elif text.counts is not None and sums["tokens"] < text.counts.characters:
            sums["words"] = text.num_words or 0
        return {name: size for name, size in sums.items() if size > 0 or name == "nats"}

    @property
    def scores(self) -> dict[str, float | None]:
        """All registered scores (scores.py); None for those whose sums are not known."""
        return finish(self.named_sums)

    def to_json(self) -> dict[str, Any]:
        """The object that `txl eval --json` prints; a number too large for a float is null."""
        named, details = self.named_sums, {}
        if self.breakdown is not None and self.counted_split is not None:
            details["details"] = details_to_json(self.breakdown, self.counted_split)
        return {
            "nats": named["nats"],
            "tokens_scored": named["tokens"],
            "bytes_scored": named.get("bytes"),
            **{name: in_range(value) for name, value in finish(named).items()},
            **(
                {"not_counted": self.text.reason}
                if self.text.counts is None
                else {f"{name}_scored": count for name, count in self.text.counts}
            ),
            **asdict(self.settings),
            "memory": self.memory,
            "context_tokens": self.context_tokens,
            "num_chunks": self.num_chunks,
            "context_overhead": self.overhead,
            "data_sha256": self.data.digest,
            "model_sha256": self.model.digest,
            "protocol": self.protocol,
            **details,
        }


def plan_evaluation(
    source: TokenSource, settings: EvaluationSettings, model: ModelConfig
) -> list[EvaluationChunk]:
    """The chunks of a split for this model. Raises DataError if the split has no target."""
    num_tokens = int(source.block_tokens.sum())
    num_targets = min(num_tokens, settings.max_tokens or num_tokens) - 1
    if num_targets < 1:
        raise DataError(
            f"split {settings.split} holds {num_tokens} tokens; scoring needs at least 2. Prepare "
            f"more text, or give it a larger share: txl prepare ... --split {settings.split}=0.1"
        )

    # Reads the age of one token per chunk: those of a whole split might not fit in RAM.
    def document_start(position: int) -> int:
        _, age = read_range(source, position, position + 1)
        return position - int(age[0])

    context = context_tokens(settings, model)
    knows_start = context is not None or model.memory_facts.documents_are_independent
    return plan_chunks(
        num_targets=num_targets,
        tgt_len=settings.tgt_len,
        context_tokens=context,
        document_start=document_start if settings.reset == "document" and knows_start else None,
    )


def context_tokens(settings: EvaluationSettings, model: ModelConfig) -> int | None:
    """The tokens that are read before a chunk; None: there is no limit within a document.

    Mode `fast` has the context of a model of one layer, and is not exact.
    """
    model = replace(model, mem_len=settings.mem_len, same_length=settings.same_length)
    if settings.mode == "fast":
        model = replace(model, n_layer=1, mem_shares=())
    return memory_kind(model).receptive_tokens(settings.tgt_len)
