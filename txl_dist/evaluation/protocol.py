"""The protocol line: everything that a reader must know to compare a score, in one line.

split test, 245,569 tokens scored, mode exact, tgt_len 64, mem_len 640, clamp_len 400,
same_length false, reset document, weights last, fp32, biased_attention on cpu, word = ...
"""

from collections.abc import Sequence

from txl_dist.evaluation.job import EvaluationSettings
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.evaluation.scored_text import ScoredText


def protocol_line(
    settings: EvaluationSettings,
    sums: LossSums,
    text: ScoredText,
    *,
    weights: str,
    kernels: Sequence[str],
) -> str:
    """One line to quote next to the score."""
    clamp_len = "none" if settings.clamp_len is None else settings.clamp_len
    parts = [
        f"split {settings.split}",
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
