"""Which text was scored, in units that do not depend on the tokenizer.

The manifest has the counts of each split. The first token of a split has no loss, so its text is
subtracted; in most datasets it is an end-of-document token, which has no text.
"""

from dataclasses import dataclass

from data_pipeline.shards.manifest import ShardManifest, open_tokenizer
from data_pipeline.shards.shard_reader import SplitReader
from data_pipeline.shards.text_counts import TextCounts, count_text
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.word import WordTokenizer


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
    """UTF-8 bytes of the text. A word model replaces unknown words, so its tokens have others."""

    @property
    def num_words(self) -> int | None:
        """What a word model predicts: words, line ends (`<eos>`) and document ends."""
        if self.counts is None:
            return None
        return self.counts.words + self.counts.line_ends + self.document_ends


def scored_text(source: SplitReader, *, max_tokens: int | None = None) -> ScoredText:
    """The text of a split whose targets are all scored; unknown for a part of a split."""
    manifest: ShardManifest = source.manifest
    counts = source.entry.text_counts
    tokenizer = open_tokenizer(source.directory, manifest)
    is_word_model = isinstance(tokenizer, WordTokenizer)
    reason = ""
    if isinstance(tokenizer, IdTokenizer):
        reason = "the dataset was prepared from token ids, which have no text"
    elif max_tokens is not None and max_tokens < source.num_tokens:
        reason = f"only the first {max_tokens:,} tokens of the split were scored"
    elif counts is None:
        reason = (
            f"the manifest of {source.directory} has no word counts, because an older "
            "version of txl prepared it; prepare the text again"
        )
    if counts is None or reason:
        return ScoredText(reason=reason, is_word_model=is_word_model)
    document_ends = source.entry.documents if tokenizer.opens_documents else 0
    num_bytes = source.entry.text_bytes
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
