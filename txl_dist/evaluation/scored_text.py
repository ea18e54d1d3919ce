"""Which text was scored, in units that do not depend on the tokenizer.

The manifest has the counts of each split. The first token of a split has no loss, so its text is
subtracted; in most datasets it is an end-of-document token, which has no text.
"""

from dataclasses import dataclass

from data_pipeline.shards.manifest import ShardManifest, open_tokenizer
from data_pipeline.shards.shard_reader import SplitReader
from data_pipeline.shards.text_counts import TextCounts, count_text


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The counts of the scored text, or why there are none."""

    counts: TextCounts | None = None
    reason: str = "the text was not counted"
    """Used if `counts` is None."""

    @property
    def num_words(self) -> int | None:
        """Words and line ends: word models of the paper predict both, the latter as `<eos>`."""
        return None if self.counts is None else self.counts.words + self.counts.line_ends


def scored_text(source: SplitReader, *, max_tokens: int | None = None) -> ScoredText:
    """The text of a split whose targets are all scored; unknown for a part of a split."""
    manifest: ShardManifest = source.manifest
    counts = source.entry.text_counts
    if max_tokens is not None and max_tokens < source.num_tokens:
        return ScoredText(reason=f"only the first {max_tokens:,} tokens of the split were scored")
    if counts is None:
        return ScoredText(
            reason=f"the manifest of {source.directory} has no word counts, because an older "
            "version of txl prepared it; prepare the text again"
        )
    tokenizer = open_tokenizer(source.directory, manifest)
    first = source.read(0, 0, 1)
    if int(first[0]) != manifest.end_of_document:
        counts -= count_text(tokenizer.decode(first))
    return ScoredText(counts)
