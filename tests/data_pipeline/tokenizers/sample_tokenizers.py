"""Small tokenizers and texts for the tests of tokenizers."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import train_tokenizer
from data_pipeline.tokenizers.pretrained import PretrainedTokenizer

CHAR, WORD = PrepareSettings(tokenizer="char"), PrepareSettings(tokenizer="word")
LM1B = PrepareSettings(tokenizer="word", recipe="lm1b", min_freq=1)
SETTINGS = PrepareSettings(tokenizer="bpe", vocab_size=500)
FILE = PrepareSettings(tokenizer="file")
LINES = " the cat <eos> sat \n\n\tthe  mat <unk>\r\nthe end\n"
SAMPLE = [
    "The quick brown fox's den isn't far; they'll be back by 1984.\n\n    indented  text\r\n" * 5,
    "潮は満ちる. السلام عليكم. aaaaaaaaaaaaaaa 👩‍👩‍👧 naïve <|endoftext|>" * 4,
    *(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py"))),
]


def trained() -> PretrainedTokenizer:
    tokenizer = train_tokenizer(SETTINGS, lambda: iter(SAMPLE))
    assert isinstance(tokenizer, PretrainedTokenizer)
    return tokenizer


TOKENIZER = trained()


def byte_level(*pairs: tuple[str, str]) -> dict[str, object]:
    """The library's JSON of byte-level BPE with these merges."""
    vocab = {token: id_ for id_, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(pairs)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return json.loads(library.to_str())


def with_unknown_as_only_special(kind: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(
        models.BPE(unk_token="[UNK]") if kind == "bpe" else models.Unigram()
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = (
        trainers.BpeTrainer(special_tokens=["[UNK]"], show_progress=False)
        if kind == "bpe"
        else trainers.UnigramTrainer(
            special_tokens=["[UNK]"], unk_token="[UNK]", show_progress=False
        )
    )
    library.train_from_iterator(["the cat sat", "[ U N K ] x"] * 9, trainer)
    return library
