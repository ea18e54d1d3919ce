"""One small tokenizer of each family whose files are published, built with `tokenizers`."""

import json
from collections.abc import Callable

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from data_pipeline.tokenizers.pretrained import PretrainedTokenizer, from_library_json

EUROPEAN = (
    "Ångström n'était pas à Łódź, dit-elle: «çà et là»; größer als 12.5 €.\n\n  Où?\tÀ Æbeltoft.\n"
)
JAPANESE = "潮は満ちる。静かな海、灰色の空。「どこへ?」と彼女は言った。１２月の雨。\n"
_SAMPLE = [EUROPEAN, JAPANESE, "the grey sea is far. it isn't here, and the sea is grey.\n"] * 3
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(vocab_size: int = 330) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_SAMPLE, trainer)
    return library


def _split_byte_level() -> tokenizers.Tokenizer:
    library = _byte_level()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library


def _gpt2() -> tokenizers.Tokenizer:
    library = _byte_level()
    library.add_special_tokens(["<|endoftext|>"])
    return library


def _llama3() -> tokenizers.Tokenizer:
    library = _split_byte_level()
    library.model.ignore_merges = True
    library.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return library


def _qwen() -> tokenizers.Tokenizer:
    library = _split_byte_level()
    library.normalizer = normalizers.NFC()
    library.add_tokens(["<tool_call>", "é。"])
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    return library


def _qwen25() -> tokenizers.Tokenizer:
    library = _split_byte_level()
    library.normalizer = normalizers.NFC()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    library.add_tokens(["<tool_call>", "é。"])
    library.add_special_tokens(["<|fim_pad|>"])
    library.add_tokens(["<think>"])
    return library


def _neox() -> tokenizers.Tokenizer:
    library = _byte_level()
    library.normalizer = normalizers.NFC()
    library.add_tokens(["    ", "   ", "  "])
    library.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    return library


def _sentencepiece_bpe(*, prepends: bool) -> tokenizers.Tokenizer:
    """Pieces of the letters of the text but "灰" and "Ł", which are written in bytes."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [text.replace("灰", "").replace("Ł", "").replace("€", "") for text in _SAMPLE],
        trainers.BpeTrainer(vocab_size=170, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=[(left, right) for left, right in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if prepends else []
    library.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if prepends else [])]
    )
    return library


def _llama2() -> tokenizers.Tokenizer:
    return _sentencepiece_bpe(prepends=True)


def _gemma() -> tokenizers.Tokenizer:
    library = _sentencepiece_bpe(prepends=False)
    library.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("<start>")])
    return library


def _t5() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    library.train_from_iterator([text.replace("灰", "") for text in _SAMPLE], trainer)
    return library


def _bert() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    library.train_from_iterator([text.replace("灰", "") for text in _SAMPLE], trainer)
    return library


LIBRARY_OF: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": _gpt2,
    "llama3": _llama3,
    "qwen": _qwen,
    "qwen2.5": _qwen25,
    "neox": _neox,
    "llama2": _llama2,
    "gemma": _gemma,
    "t5": _t5,
    "bert": _bert,
}
"""By family. Mistral's is that of Llama 2, XLNet's that of T5."""
IN_BYTES = ("gpt2", "llama3", "qwen", "qwen2.5", "neox", "llama2", "gemma")
"""Families that write unknown characters in bytes."""


def tokenizer_of_family(family: str) -> PretrainedTokenizer:
    return from_library_json(json.loads(LIBRARY_OF[family]().to_str()), f"{family}.json")
