"""The result of an evaluation: its schema, and the protocol line.

    sums of all chunks -> EvaluationResult -> JSON -> tables, MLflow, report, model card

`EvaluationResult` is what `evaluate` returns and what `txl eval --json` prints and keeps in
RUN/evaluations. Everything that shows or reads a result uses it, with the labels and formats of
`SCORES` (scores.py).

The protocol line has everything that a reader must know to compare a score:

split test of wt103 (sha256 0f3c96a1b2d4), model wt103-base/step-00200000 (sha256 91d0a7c3e5f2),
245,568 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400, same_length true,
reset stream, weights last, fp32, sdpa on cpu, word = ...

The text is counted in units that do not depend on the tokenizer. The manifest has the counts of
each split. The first token of a split has no loss, so its text is subtracted; in most datasets it
is an end-of-document token, which has no text. An unknown token is easier to predict than the text
it replaces, so with such targets there are no bits per byte and per character.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from data_pipeline.errors import counted
from data_pipeline.shards.manifest import TextCounts, open_tokenizer
from data_pipeline.shards.shard_reader import SplitReader
from data_pipeline.shards.shard_writer import count_text
from data_pipeline.system.strict import first_problem
from data_pipeline.tokenizers.byte_char_word import WordTokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from txl_dist.checkpoint.directory import model_name
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import count_tokens, in_range
from txl_dist.evaluation.scores import FOLDER, SCORES, LossSums, finish

if TYPE_CHECKING:
    from txl_dist.evaluation.spec import EvaluationSettings

SHOWN_DIGITS = 12
Number: TypeAlias = Annotated[float, Field(strict=True)]
"""Not a bool and not text."""


class EvaluationResult(BaseModel):
    """One score, and the settings that reproduce it.

    In JSON the scores are keys like all others, and what has no value here is left out. Unknown
    keys, of other versions, are ignored.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    checkpoint: str
    split: str
    nats: Number = 0.0
    """The sum over all targets."""
    tokens_scored: int
    bytes_scored: int | None = None
    scores: dict[str, Number | None]
    """All of `SCORES`; None for one whose sum is not known, or too large for a float."""
    words_scored: int | None = None
    line_ends_scored: int | None = None
    characters_scored: int | None = None
    unknown_targets: int = 0
    not_counted: str | None = None
    mode: str
    tgt_len: int
    mem_len: int
    clamp_len: int | None = None
    same_length: bool = False
    reset: str = ""
    precision: str = ""
    max_tokens: int | None = None
    memory: str = "recurrent"
    context_tokens: int | None = 0
    num_chunks: int = 1
    context_overhead: Number = 0.0
    data_sha256: str
    model_sha256: str
    protocol: str
    details: Mapping[str, Any] | None = None
    """What `txl eval --details` adds (`details_to_json`)."""
    data: str = ""
    weights: str = ""
    workers: int = 1
    selected: bool | None = None
    """Of a sweep: whether its settings are the best ones."""
    save_id: str | None = None
    """In RUN/evaluations: the save that was scored, by which MLflow finds the model."""

    @model_validator(mode="before")
    @classmethod
    def _collect_scores(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {"scores": {name: content[name] for name in SCORES if name in content}, **content}

    @model_validator(mode="after")
    def _require_loss(self) -> Self:
        if self.scores.get("nats_per_token") is None:
            raise ValueError("nats_per_token: a number is required")
        return self

    @model_serializer(mode="wrap")
    def _spread_scores(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for name, value in handler(self).items():
            content |= value if name == "scores" else {name: value}
        return content

    def to_json(self) -> dict[str, Any]:
        """The object that `txl eval --json` prints."""
        return self.model_dump(exclude_unset=True)

    @property
    def name(self) -> str:
        """`RUN/step-NNNNNNNN`, or the name of the exported model."""
        return model_name(Path(self.checkpoint))

    @property
    def sums(self) -> LossSums:
        """What was scored; 0 bytes if they are not known."""
        return LossSums(self.nats, self.tokens_scored, self.bytes_scored or 0)

    @property
    def nats_per_token(self) -> float:
        value = self.scores["nats_per_token"]
        assert value is not None, "checked by _require_loss"
        return value

    @property
    def known_scores(self) -> dict[str, float]:
        return {name: value for name, value in self.scores.items() if value is not None}

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that the score depends on: equal for results of the same evaluation."""
        return (
            self.model_sha256, self.data_sha256, self.split, self.mode, self.tgt_len, self.mem_len,
            self.clamp_len, self.same_length, self.weights, self.precision, self.tokens_scored,
        )  # fmt: skip


def table_columns(results: Iterable[EvaluationResult]) -> list[str]:
    """Names of the scores that a table of these results shows."""
    known = {name for each in results for name in each.known_scores}
    return [name for name, score in SCORES.items() if score.in_tables and name in known]


def kept_results(run: Path) -> list[Path]:
    """The results that `txl eval` has kept in a run, RUN/evaluations/SPLIT-KEY.json, by name."""
    paths = (run / FOLDER).glob("*.json")
    return sorted(path for path in paths if not path.name.startswith("step-"))


def read_result(path: Path, *, model_digest: str | None = None) -> EvaluationResult:
    """The result of `txl eval` in a file. Raises OSError.

    Raises CheckpointError for another file, and for the result of another model than that with
    this digest.
    """
    try:
        result = EvaluationResult.model_validate(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise CheckpointError(
            f"{path} is not a result of txl eval ({problem}). Write one: txl eval "
            "CHECKPOINT DATA --json > FILE"
        ) from None
    if model_digest not in (None, result.model_sha256):
        raise CheckpointError(
            f"{path} is the score of another model (sha256 {result.model_sha256[:12]}) than the "
            f"one that is exported (sha256 {model_digest:.12}). Score this one: txl eval "
            "CHECKPOINT DATA --json > FILE"
        )
    return result


def named(name: str, digest: str) -> str:
    """What a score depends on, in a protocol: `wt103 (sha256 0f3c96a1b2d4)`.

    `digest`: hex sha256, of a dataset its manifest, of a model its architecture and weights.
    """
    return f"{name} (sha256 {digest[:SHOWN_DIGITS]})"


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The counts of the scored text, or why scores of it are missing."""

    counts: TextCounts | None = None
    reason: str = ""
    document_ends: int = 0
    """End-of-document tokens that were scored."""
    is_word_model: bool = False
    """Every token is a word, the end of a line or the end of a document. Recipe lm1b also marks
    where a line begins, which papers do not predict."""
    num_bytes: int | None = None
    """UTF-8 bytes of the text, which most tokenizers normalize, so their tokens do not tell it. 0:
    not known; None: what the tokens tell."""
    unknown_targets: int = 0
    """Scored targets that are the tokenizer's unknown token."""

    def counted(self, sums: LossSums) -> LossSums:
        """The sums of this text with its bytes, if they are known."""
        return sums if self.num_bytes is None else replace(sums, num_bytes=self.num_bytes)

    @property
    def num_words(self) -> int | None:
        """What a word model predicts: words, line ends (`<eos>`) and document ends."""
        if self.counts is None:
            return None
        return self.counts.words + self.counts.line_ends + self.document_ends

    def content(self, sums: LossSums) -> dict[str, Any]:
        """The fields of an `EvaluationResult` that say how much was scored, and the scores.

        `sums`: with the bytes of the text (`counted`).
        """
        named = sums.named
        if self.counts is not None and not self.unknown_targets:
            named["characters"] = self.counts.characters
        if self.is_word_model:
            named["words"] = named["tokens"]
        # The words of a model of bytes or characters are so improbable that their perplexity, of
        # 15 digits and more, says nothing.
        elif self.counts is not None and named["tokens"] < self.counts.characters:
            named["words"] = self.num_words or 0
        content: dict[str, Any] = {
            "nats": sums.nats,
            "tokens_scored": sums.num_tokens,
            "bytes_scored": sums.num_bytes if sums.num_bytes > 0 else None,
            "scores": {name: in_range(value) for name, value in finish(named).items()},
        }
        if self.unknown_targets:
            content["unknown_targets"] = self.unknown_targets
        if self.reason:
            content["not_counted"] = self.reason
        return content | {f"{name}_scored": count for name, count in self.counts or ()}

    @property
    def definition_of_a_word(self) -> str:
        if self.is_word_model:
            return "word = token of the model: a word, the end of a line or a document end"
        if self.counts is None:
            return f"words not counted ({self.reason})"
        return (
            f"word = whitespace-separated word ({self.counts.words:,}), line end "
            f"({self.counts.line_ends:,}) or document end ({self.document_ends:,}) of the text as "
            "prepared, not detokenized"
        )


def scored_text(source: SplitReader, *, max_tokens: int | None = None) -> ScoredText:
    """The text of a split whose targets are all scored; not counted for a part of a split."""
    tokenizer = open_tokenizer(source.directory, source.manifest)
    is_word_model = isinstance(tokenizer, WordTokenizer) and tokenizer.lines == "end"
    first = source.read(0, 0, 1)
    reason, unknown_targets = "", 0
    if tokenizer.unknown_id is not None:
        count_V = count_tokens(source, max_tokens=max_tokens)
        unknown_targets = int(count_V[tokenizer.unknown_id] - (first[0] == tokenizer.unknown_id))
    if isinstance(tokenizer, IdTokenizer):
        reason = "the dataset was prepared from token ids, which have no text"
    elif max_tokens is not None and max_tokens < source.num_tokens:
        reason = f"only the first {max_tokens:,} tokens of the split were scored"
    if reason:
        return ScoredText(
            reason=reason, is_word_model=is_word_model, unknown_targets=unknown_targets
        )
    document_ends = source.entry.documents if tokenizer.opens_documents else 0
    counts, num_bytes = source.entry.text_counts, source.entry.text_bytes
    if int(first[0]) == source.manifest.end_of_document:
        document_ends -= 1
    else:
        text = tokenizer.decode(first)
        counts -= count_text(text)
        num_bytes -= len(tokenizer.decode_bytes(first))  # a part of a character is no text
    return ScoredText(
        counts,
        reason="unknown targets do not tell their text" if unknown_targets else "",
        document_ends=document_ends,
        is_word_model=is_word_model,
        num_bytes=0 if unknown_targets else num_bytes,
        unknown_targets=unknown_targets,
    )


def protocol_line(
    settings: "EvaluationSettings",
    *,
    num_tokens: float,
    unknown_targets: int,
    data: str,
    model: str,
    memory: str,
    weights: str,
    kernels: Iterable[str],
    definition_of_a_word: str,
) -> str:
    """One line to quote next to the score. `kernels` change the last digits only.

    `data` and `model`: as `named` writes them.
    """
    max_tokens = settings.max_tokens
    is_part = max_tokens is not None and num_tokens == max_tokens - 1
    part = f"first {max_tokens:,} tokens of " if is_part else ""
    unknown = f"{counted(unknown_targets, 'unknown target')} ({unknown_targets / num_tokens:.2%})"
    parts = [
        f"{part}split {settings.split} of {data}",
        f"model {model}",
        f"{num_tokens:,} tokens scored",
        *([unknown] if unknown_targets else ()),
        f"mode {settings.mode}",
        f"tgt_len {settings.tgt_len}",
        *([f"memory {memory}"] if memory != "recurrent" else ()),
        f"mem_len {settings.mem_len}",
        f"clamp_len {'none' if settings.clamp_len is None else settings.clamp_len}",
        f"same_length {str(settings.same_length).lower()}",
        f"reset {settings.reset}",
        f"weights {weights}",
        settings.precision,
        " and ".join(sorted(kernels)),
        definition_of_a_word,
    ]
    return ", ".join(parts)
