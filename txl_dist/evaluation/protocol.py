"""The protocol line: everything that a reader must know to compare a score, in one line.

split test of wt103 (sha256 0f3c96a1b2d4), model wt103-base/step-00200000 (sha256 91d0a7c3e5f2),
245,568 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400, same_length true,
reset stream, weights last, fp32, sdpa on cpu, word = ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from txl_dist.evaluation.job import EvaluationSettings
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.evaluation.scored_text import ScoredText

SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Subject:
    """What a number depends on, a dataset or a model: its name and its digest."""

    name: str
    digest: str
    """Hex sha256: of a dataset its manifest, of a model its architecture and weights."""

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.digest[:SHOWN_DIGITS]})"


def model_name(checkpoint: Path) -> str:
    """RUN/step-NNNNNNNN for a checkpoint of a run, else the name of the directory."""
    if checkpoint.parent.name == "checkpoints":
        return f"{checkpoint.parent.parent.name}/{checkpoint.name}"
    return checkpoint.name


def protocol_line(
    settings: EvaluationSettings,
    sums: LossSums,
    text: ScoredText,
    *,
    data: Subject | None,
    model: Subject | None,
    weights: str,
    kernels: Sequence[str],
) -> str:
    """One line to quote next to the score. Data and model are None for weights that are not stored:
    those of a run that trains."""
    clamp_len = "none" if settings.clamp_len is None else settings.clamp_len
    parts = [
        f"split {settings.split}{f' of {data}' if data else ''}",
        *([f"model {model}"] if model else []),
        f"{sums.num_tokens:,} tokens scored",
        f"mode {settings.mode}",
        f"tgt_len {settings.tgt_len}",
        f"mem_len {settings.mem_len}",
        f"clamp_len {clamp_len}",
        f"same_length {str(settings.same_length).lower()}",
        f"reset {settings.reset}",
        f"weights {weights}",
        settings.precision,
        " and ".join(kernels) or "attention not recorded",
        _words(text),
    ]
    return ", ".join(parts)


def _words(text: ScoredText) -> str:
    if text.is_word_model:
        return "word = token of the model: a word, the mark of a line or a document end"
    if text.counts is None:
        return f"words not counted ({text.reason})"
    return (
        f"word = whitespace-separated word ({text.counts.words:,}), line end "
        f"({text.counts.line_ends:,}) or document end ({text.document_ends:,}) of the text as "
        "prepared, not detokenized"
    )
