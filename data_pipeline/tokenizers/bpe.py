"""Train byte-level BPE with the `tokenizers` library and GPT-2's pattern.

The vocabulary depends on the texts and their order alone: not on how texts are cut into fragments
for the trainer, and not on the number of its threads.
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
_PART_CHARS = 2**16
_NUM_SAMPLES = 64


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, min_freq: int | None = None, max_bytes: int
) -> PretrainedTokenizer:
    """Train BPE on the first `max_bytes` UTF-8 bytes of `texts`.

    The vocabulary has at most `vocab_size` ids; the last one is end-of-document. It has fewer if
    too few pairs occur `min_freq` times. Raises DataError for an empty text, or if tiktoken (which
    encodes) and tokenizers (which trains) disagree on a sample of the text.
    """
    training_text = _TrainingText(texts, max_bytes)
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
    library.train_from_iterator(iter(training_text), trainer)
    if not training_text.samples:
        raise DataError("there is no text to train bpe on. Give documents with text in them.")
    description = PretrainedDescription(
        type="bpe",
        end_of_document=library.get_vocab_size(),
        tokenizer=json.loads(library.to_str()),
    )
    try:
        tokenizer = PretrainedTokenizer(description)
    except ValueError as error:  # a long run of one character trains a token that is too long
        raise DataError(
            f"bpe trained on this text cannot be used: {error}. Remove long runs of the same "
            "characters from the text, or choose a smaller --vocab-size."
        ) from error
    require_same_ids(tokenizer, training_text.samples)
    return tokenizer


class _TrainingText:
    """Iterates over the first `max_bytes` of `texts` in parts, and keeps some parts as samples."""

    def __init__(self, texts: Iterable[str], max_bytes: int) -> None:
        self._texts, self._bytes_left = texts, max_bytes
        self.samples: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for number, part in enumerate(self._parts()):
            # Samples all of the first 128 parts, every 2nd of the next 128, every 4th of the next
            # 256, and so on: the total is unknown, and the samples are held in memory.
            if number % (1 << max(0, number.bit_length() - _NUM_SAMPLES.bit_length())) == 0:
                self.samples.append(part)
            yield part

    def _parts(self) -> Iterator[str]:
        for text in self._texts:
            for part in text_parts([text], max_chars=_PART_CHARS):
                encoded = part.encode("utf-8")
                if len(encoded) > self._bytes_left:
                    if beginning := encoded[: self._bytes_left].decode("utf-8", errors="ignore"):
                        yield beginning
                    return
                self._bytes_left -= len(encoded)
                yield part
