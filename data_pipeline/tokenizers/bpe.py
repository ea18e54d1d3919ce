"""Training byte-level BPE, with the `tokenizers` library's trainer and GPT-2's way to split text.

The vocabulary depends on the texts and their order alone: neither on how they are cut for the
trainer nor on its threads.
"""

import json
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.pretrained import (
    PretrainedDescription,
    PretrainedTokenizer,
    require_same_ids,
)
from data_pipeline.tokenizers.text_parts import text_parts

DEFAULT_MIN_FREQ = 2
_PIECE_CHARS = 2**16
_NUM_SAMPLES = 64


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, min_freq: int | None = None, max_bytes: int
) -> PretrainedTokenizer:
    """BPE of at most `vocab_size` ids, the end of a document being the last.

    Takes the beginning of the texts, at most `max_bytes` UTF-8 bytes. A text with too few pairs
    that occur `min_freq` times gives fewer ids. Raises DataError when there is no text, or when the
    two libraries that train and encode do not give the same ids for some of it.
    """
    taken = _Beginning(texts, max_bytes)
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_freq or DEFAULT_MIN_FREQ,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    library.train_from_iterator(iter(taken), trainer)
    if not taken.samples:
        raise DataError("there is no text to train bpe on. Give documents with text in them.")
    description = PretrainedDescription(
        type="bpe",
        end_of_document=library.get_vocab_size(),
        tokenizer=json.loads(library.to_str()),
    )
    try:
        tokenizer = PretrainedTokenizer(description)
    except ValueError as error:
        raise DataError(
            f"the trained bpe cannot be encoded by tiktoken ({error}). The versions of tokenizers "
            "and tiktoken do not go together: install those of constraints.txt."
        ) from error
    require_same_ids(tokenizer, taken.samples)
    return tokenizer


class _Beginning:
    """The first `max_bytes` of some texts in pieces, of which it keeps a few, evenly in growth."""

    def __init__(self, texts: Iterable[str], max_bytes: int) -> None:
        self._texts, self._left = texts, max_bytes
        self.samples: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for number, piece in enumerate(self._pieces()):
            # All of the first pieces, then every other, every fourth, ...: no total is known.
            if number % (1 << max(0, number.bit_length() - _NUM_SAMPLES.bit_length())) == 0:
                self.samples.append(piece)
            yield piece

    def _pieces(self) -> Iterator[str]:
        for text in self._texts:
            for piece in text_parts([text], max_chars=_PIECE_CHARS):
                encoded = piece.encode("utf-8")
                if len(encoded) > self._left:
                    if beginning := encoded[: self._left].decode("utf-8", errors="ignore"):
                        yield beginning
                    return
                self._left -= len(encoded)
                yield piece
