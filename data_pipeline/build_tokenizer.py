"""The tokenizer of a dataset: named by the settings, or trained on the corpus.

The one place between the corpus and the shards where a tokenizer comes from.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer


def build_tokenizer(
    corpus: Corpus, shards: Mapping[str, list[np.ndarray]], settings: PrepareSettings
) -> Tokenizer:
    """The tokenizer for these documents. `shards` are per split the numbers of every shard's."""
    return ByteTokenizer()


def token_pieces(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """A document's tokens in pieces, its opening end-of-document token first.

    `texts` are its text in pieces cut anywhere; the tokens are those of the whole.
    """
    yield np.array([tokenizer.end_of_document])
    for text in texts:  # bytes are the same however the text is cut
        yield tokenizer.encode(text)
