"""Convert byte-level BPE from a file of `tokenizers` to the ranked byte strings of tiktoken.

tiktoken merges the adjacent pair with the lowest rank of the joined bytes. `tokenizers` merges the
pair that comes first in its list of merges. Both give the same ids for every text if and only if,
for every token, merging the token's own bytes ends with the pair that its merge names: nothing
outside a token affects the merges inside it. `ranked_bytes` checks this for every token, so equal
ids do not depend on samples of text.
"""

from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import Any, cast

import tokenizers
from tokenizers import models

from data_pipeline.system.strict_json import canonical_json

MAX_TOKEN_BYTES = 1024
"""Merging a token's bytes may take quadratic time. Tokens of real vocabularies have at most 128."""

# GPT-2's pattern. The alternatives without lookahead are one group, which compiles to a finite
# automaton and takes half the time of separate alternatives.
GPT2_PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+)|\s+\z)|\s+(?!\S)|\s"
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


def _byte_of_character() -> dict[str, int]:
    """The character for each byte in such files: itself if printable, else chr(256), chr(257)..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


BYTE_OF = _byte_of_character()
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in BYTE_OF.items()})


def ranked_bytes(
    content: dict[str, Any], *, leave_out: str | None, model: models.BPE | None = None
) -> dict[bytes, int]:
    """Token bytes -> id, if tiktoken gives the same ids as `tokenizers` for this file's content.

    `leave_out` is the vocabulary's end-of-text token, `model` the content's model if it is loaded.
    Raises ValueError with the reason if the two libraries would differ.
    """
    _require_plain_bpe(content)
    vocab = {token: id_ for token, id_ in content["model"]["vocab"].items() if token != leave_out}
    ranks = dict(zip(_bytes_of(vocab), vocab.values(), strict=True))
    sides = [side for merge in content["model"]["merges"] for side in _sides(merge)]
    parts = _bytes_of(sides)
    pairs = [*zip(parts[::2], parts[1::2], strict=True)]
    merged = [left + right for left, right in pairs]
    tokens = {*merged, *(bytes([byte]) for byte in range(256))}
    if tokens != ranks.keys() or len(merged) + 256 != len(ranks):
        raise ValueError("the tokens are not the 256 bytes and one token per merge")
    if any(ranks[low] >= ranks[high] for low, high in pairwise(merged)):
        raise ValueError("the ids are not in the order of the merges")
    model = model or cast(models.BPE, tokenizers.Tokenizer.from_str(canonical_json(content)).model)
    written = map(str.__add__, sides[::2], sides[1::2])
    _require_reachable(pairs, dict(zip(merged, written, strict=True)), model)
    return ranks


def _bytes_of(written: Collection[str]) -> list[bytes]:
    """The byte string of each token.

    One conversion for all: one for each of 100,000 strings would take most of the time of loading.
    """
    if not all(written) or not BYTE_OF.keys() >= {*"".join(written)}:
        wrong = next(token for token in written if not token or not BYTE_OF.keys() >= {*token})
        raise ValueError(f"token {wrong[:40]!r} is not written in bytes")
    joined = "".join(written).translate(_TO_LATIN_1).encode("latin-1")
    ends = [*accumulate(map(len, written), initial=0)]
    return [joined[start:end] for start, end in pairwise(ends)]


def _sides(merge: str | list[str]) -> list[str]:
    # Older versions of the library write "left right", newer ones ["left", "right"].
    sides = merge.split(" ") if isinstance(merge, str) else merge
    if len(sides) != 2:
        raise ValueError(f"merge {merge!r} does not have two sides")
    return sides


def _require_plain_bpe(content: dict[str, Any]) -> None:
    if content.get("normalizer") is not None or content.get("added_tokens"):
        raise ValueError("it has a normalizer or added tokens")
    split = content.get("pre_tokenizer") or {}
    if {**split, **_GPT2_SPLIT} != split or split.keys() - _GPT2_SPLIT.keys() - {"trim_offsets"}:
        raise ValueError("its text is not split by GPT-2's pattern")
    model = {**_PLAIN_MODEL, **content["model"]}
    if model.get("type") != "BPE" or {**model, **_PLAIN_MODEL} != model:
        raise ValueError("its model is not plain BPE")


def _require_reachable(
    merges: list[tuple[bytes, bytes]], written: dict[bytes, str], model: models.BPE
) -> None:
    """Raise ValueError unless merging the bytes of every token ends with the pair of its merge.

    Each token has one merge, so the merges of exactly its bytes end with that pair. If in
    addition both sides of every merge come before it, no merge of the token comes after its last
    one: tiktoken applies the same ones. `written` has every token as the file writes it.
    """
    earlier = {bytes([byte]) for byte in range(256)}
    for (left, right), (token, characters) in zip(merges, written.items(), strict=True):
        if len(token) > MAX_TOKEN_BYTES:
            raise ValueError(f"a token has {len(token)} bytes, the maximum is {MAX_TOKEN_BYTES}")
        sides_are_earlier = left in earlier and right in earlier
        if not sides_are_earlier or len(model.tokenize(characters)) != 1:
            raise ValueError(f"the merges do not lead to the token {token[:40]!r}")
        earlier.add(token)
