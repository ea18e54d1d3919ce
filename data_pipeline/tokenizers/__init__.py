"""Tokenizers: text to token ids and back. They are saved as strict JSON, never as pickles.

    interface.py    the Tokenizer protocol: the methods that all kinds have
    byte_char_word.py  bytes; characters or words of the training text, with line ends
    pretrained.py      byte-level BPE (trained by bpe.py), or a file of the `tokenizers` library
    encoders.py        gigatoken, which encodes byte-level BPE faster
    ids.py             token ids of the input, written as decimal numbers or by name
    training.py        choose and train the tokenizer of a dataset; recipes of the paper's datasets
    loading.py         read a tokenizer.json, and compare two

Every tokenizer has an id that no text encodes to, `end_of_document`. Special tokens that occur in
the text are encoded as ordinary text. The digest of a tokenizer's canonical JSON identifies it in
shards and checkpoints; names of ids are no part of it.

Example:

    tokenizer = train_tokenizer(PrepareSettings(tokenizer="char"), lambda: iter(["some text"]))
    tokenizer.decode(tokenizer.encode("text"))
"""

from data_pipeline.tokenizers.byte_char_word import ByteTokenizer
from data_pipeline.tokenizers.interface import Cuts, Tokenizer, token_dtype
from data_pipeline.tokenizers.loading import load_tokenizer
from data_pipeline.tokenizers.training import (
    cuts_of,
    needs_training,
    ready_tokenizer,
    sum_of_counts,
    tokenizer_of_counts,
    train_tokenizer,
)

__all__ = [
    "ByteTokenizer",
    "Cuts",
    "Tokenizer",
    "cuts_of",
    "load_tokenizer",
    "needs_training",
    "ready_tokenizer",
    "sum_of_counts",
    "token_dtype",
    "tokenizer_of_counts",
    "train_tokenizer",
]
