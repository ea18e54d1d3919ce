"""gigatoken, a faster encoder of byte-level BPE that gives the ids of `tokenizers`.

gigatoken splits a text by tables of Unicode 17, `tokenizers` 0.23 by those of Unicode 16. The
characters that became letters or digits in between (`OTHER_CLASS`) are split differently, so a text
with one of them is encoded by `tokenizers`. `tests/data_pipeline/tokenizers` compares both
libraries for every code point. Other versions of either library may differ in other characters;
`reason_without_gigatoken` therefore refuses versions that were not compared.
"""

import functools
import re
from itertools import pairwise
from typing import Any

import numpy as np

COMPARED_VERSION = "0.10.0"
_ASCII = bytes(range(128))
OTHER_CLASS = re.compile(
    # The first class is fast and excludes most characters, those of most scripts.
    r"[\u088f\u0c5c\u0cdc\ua7ce-\ua7cf\ua7d2\ua7d4\ua7f1\U00010940-\U00033479](?<=["
    r"\u088f\u0c5c\u0cdc\ua7ce-\ua7cf\ua7d2\ua7d4\ua7f1\U00010940-\U00010959"
    r"\U00010ec5-\U00010ec7\U00011db0-\U00011ddb\U00011de0-\U00011de9\U00016ea0-\U00016eb8"
    r"\U00016ebb-\U00016ed3\U00016ff2-\U00016ff6\U000187f8-\U000187ff\U00018d09-\U00018d1e"
    r"\U00018d80-\U00018df2\U0001e6c0-\U0001e6de\U0001e6e0-\U0001e6e2\U0001e6e4-\U0001e6e5"
    r"\U0001e6e7-\U0001e6ed\U0001e6f0-\U0001e6f4\U0001e6fe-\U0001e6ff\U0002b73a-\U0002b73f"
    r"\U0002cea2-\U0002cead\U000323b0-\U00033479"
    r"])"
)
"""Characters that gigatoken 0.10.0 and tokenizers 0.23 do not put in the same class."""
CHARACTERS_OF_EARLIER_VERSIONS = (
    "\u061d \u1c8a \u2fffa \ua7cb1 \ua7cda \ua7dca \u0cf3a \u0c5da \U00010d40a \U00011f50a "
    "\U00016d70a \U0001e4d0a \U00031350a \U0002ebf0a \U0001fae9a"
)
"""Characters of Unicode 14 to 16: older tables of `tokenizers` have other classes for some."""
MAX_GROWTH_BYTES = 96 * 2**20
_CHECK_BYTES = 2 * 2**20
"""Bytes of text between two checks of the RAM of the process."""


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
"""The byte of each character in the tokens of a byte-level BPE. A printable byte is written as its
own character."""


class GigatokenEncoder:
    """Encodes texts without a character of `OTHER_CLASS`. `content` is the library's JSON."""

    def __init__(self, content: str) -> None:
        self._content = content.encode()
        self._start()

    def _start(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._backend: Any = None  # free the caches before the new ones are made
        self._backend = load_hf_json(self._content)
        self._limit = resident_bytes() + MAX_GROWTH_BYTES
        self._unchecked = 0

    def encode(self, text: str) -> np.ndarray | None:
        """uint32 [tokens], or None if only `tokenizers` gives the right ids.

        Raises UnicodeEncodeError for lone surrogates.
        """
        if needs_reference(text):
            return None
        # Not gigatoken's own batches: they import awkward, which takes 0.4 s, and are not faster
        # even for texts of 50 characters.
        ids: np.ndarray = self._backend.encode(text)
        self._unchecked += len(text)
        if self._unchecked >= _CHECK_BYTES:
            self._unchecked = 0
            if resident_bytes() > self._limit:
                self._start()
        return ids


def needs_reference(text: str) -> bool:
    """Whether a text has a character of `OTHER_CLASS`.

    Raises UnicodeEncodeError for lone surrogates.
    """
    if text.isascii():
        return False
    # Most texts are mostly ASCII, and the search takes longer than leaving that out.
    others = text.encode("utf-8").translate(None, _ASCII).decode("utf-8")
    return OTHER_CLASS.search(others) is not None


@functools.cache
def reason_without_gigatoken() -> str:
    """Why gigatoken cannot be used in this process; "" if it can."""
    from importlib.metadata import PackageNotFoundError, version

    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    try:
        found = version("gigatoken")
        from gigatoken.gigatoken_rs import pretokenizer
    except (PackageNotFoundError, ImportError):
        return "gigatoken is not installed"
    if found != COMPARED_VERSION:
        return f"gigatoken is {found}, and only {COMPARED_VERSION} was compared with tokenizers"
    text = CHARACTERS_OF_EARLIER_VERSIONS
    spans = [span for _, span in ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    if [text[low:high].encode() for low, high in spans] != [*pretokenizer(text.encode())]:
        return f"tokenizers {tokenizers.__version__} has the tables of another Unicode version"
    return ""


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


# --- which tokenizers it encodes -----------------------------------------------------------------


_GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PLAIN_MODEL = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def require_gpt2_bpe(content: dict[str, Any], *, leave_out: str | None) -> None:
    """Raise ValueError with the reason unless a file's content is byte-level BPE with GPT-2's
    pattern: gigatoken may encode others in another way than `tokenizers`.

    `leave_out` is the vocabulary's end-of-text token.
    """
    if content.get("normalizer") is not None or content.get("added_tokens"):
        raise ValueError("it has a normalizer or added tokens")
    split = content.get("pre_tokenizer") or {}
    if {**split, **_GPT2_SPLIT} != split or split.keys() - _GPT2_SPLIT.keys() - {"trim_offsets"}:
        raise ValueError("its text is not split by GPT-2's pattern")
    model = {**_PLAIN_MODEL, **content["model"]}
    if model.get("type") != "BPE" or {**model, **_PLAIN_MODEL} != model:
        raise ValueError("its model is not plain BPE")
    vocab = {token: id_ for token, id_ in content["model"]["vocab"].items() if token != leave_out}
    if "" in vocab or not BYTE_OF.keys() >= {*"".join(vocab)}:
        raise ValueError("its tokens are not written in bytes")
    merged = []
    earlier = {*BYTE_OF}
    for merge in content["model"]["merges"]:
        # Older versions of the library write "left right", newer ones ["left", "right"].
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left not in earlier or right not in earlier:
            raise ValueError(f"the merges do not lead to the token {left + right!r:.40}")
        merged.append(left + right)
        earlier.add(left + right)
    if earlier != vocab.keys() or len(merged) + 256 != len(vocab):
        raise ValueError("the tokens are not the 256 bytes and one token per merge")
    if any(vocab[low] >= vocab[high] for low, high in pairwise(merged)):
        raise ValueError("the ids are not in the order of the merges")
