"""Tokenizers: text to token ids and back, saved as strict JSON (never pickle).

Every tokenizer has one id that no text can produce, `end_of_document`; a special token written in
the text is ordinary text. The digest of its canonical JSON ties shards and checkpoints to it.

`byte.py`, `char.py`, `word.py` and `pretrained.py` are the kinds, `recipes.py` the paper's corpora,
`training.py` makes a tokenizer from a corpus, `loading.py` reads one back.
"""

from data_pipeline.tokenizers.byte import ByteTokenizer
from data_pipeline.tokenizers.interface import Cuts, Tokenizer, token_dtype
from data_pipeline.tokenizers.loading import load_tokenizer
from data_pipeline.tokenizers.symbol_counts import SymbolCounter, SymbolCounts
from data_pipeline.tokenizers.training import (
    cuts_of,
    needs_training,
    ready_tokenizer,
    train_tokenizer,
)

__all__ = [
    "ByteTokenizer",
    "Cuts",
    "SymbolCounter",
    "SymbolCounts",
    "Tokenizer",
    "cuts_of",
    "load_tokenizer",
    "needs_training",
    "ready_tokenizer",
    "token_dtype",
    "train_tokenizer",
]
