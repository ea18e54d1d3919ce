"""Byte-level BPE as ranked byte strings, for tiktoken's core, out of a file of `tokenizers`.

tiktoken merges the adjacent pair whose joined bytes have the lowest rank; `tokenizers` merges the
pair that its list of merges names first. The two agree on every text exactly when merging a token's
own bytes ends in the pair its merge names, for every token: inside the bytes of a token nothing
outside can interfere. That is checked here, so equal ids do not hang on samples.
"""

from itertools import pairwise
from typing import Any

MAX_TOKEN_BYTES = 1024
"""Merging a token's bytes takes quadratic time; tokens of real vocabularies have at most 128."""

# GPT-2's pattern. What needs no look ahead is one group, which makes it a finite automaton: half
# the time of the same alternatives side by side.
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
    """The characters that write bytes in such files: printable ones as themselves, then 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


BYTE_OF = _byte_of_character()


def ranked_bytes(content: dict[str, Any], *, leave_out: str | None) -> dict[bytes, int]:
    """Bytes of each token -> its id, for a tokenizer file that tiktoken encodes alike.

    `leave_out` is the vocabulary's end-of-text token. Raises ValueError saying what stands against.
    """
    _require_plain(content)
    vocab = {token: id_ for token, id_ in content["model"]["vocab"].items() if token != leave_out}
    for token in vocab:
        if not token or not BYTE_OF.keys() >= {*token}:
            raise ValueError(f"token {token[:40]!r} is not written in bytes")
    ranks = {bytes(map(BYTE_OF.__getitem__, token)): id_ for token, id_ in vocab.items()}
    pairs = [_pair(merge) for merge in content["model"]["merges"]]
    merged = [left + right for left, right in pairs]
    if sorted([*merged, *(bytes([byte]) for byte in range(256))]) != sorted(ranks):
        raise ValueError("the tokens are not the 256 bytes and one token per merge")
    if any(ranks[low] >= ranks[high] for low, high in pairwise(merged)):
        raise ValueError("the ids are not in the order of the merges")
    order = {token: number for number, token in enumerate(merged)}
    for token, pair in zip(merged, pairs, strict=True):
        if _last_pair(token, order) != pair:
            raise ValueError(f"the merges cannot make the token {token[:40]!r} of its own bytes")
    return ranks


def _require_plain(content: dict[str, Any]) -> None:
    if content.get("normalizer") is not None or content.get("added_tokens"):
        raise ValueError("it has a normalizer or added tokens")
    split = content.get("pre_tokenizer") or {}
    if {**split, **_GPT2_SPLIT} != split or split.keys() - _GPT2_SPLIT.keys() - {"trim_offsets"}:
        raise ValueError("its text is not split by GPT-2's pattern")
    model = {**_PLAIN_MODEL, **content["model"]}
    if model.get("type") != "BPE" or {**model, **_PLAIN_MODEL} != model:
        raise ValueError("its model is not plain BPE")


def _pair(merge: str | list[str]) -> tuple[bytes, bytes]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    try:
        left, right = (bytes(map(BYTE_OF.__getitem__, part)) for part in parts)
    except KeyError:
        raise ValueError(f"merge {merge!r} is not written in bytes") from None
    return left, right


def _last_pair(token: bytes, order: dict[bytes, int]) -> tuple[bytes, ...]:
    """What merging leaves of a token's bytes before the token itself is made."""
    if len(token) > MAX_TOKEN_BYTES:
        raise ValueError(f"a token has {len(token)} bytes, at most {MAX_TOKEN_BYTES} are taken")
    parts, own = [token[place : place + 1] for place in range(len(token))], order[token]
    ranks = [order.get(left + right, own) for left, right in pairwise(parts)]
    while ranks and (lowest := min(ranks)) < own:
        place = ranks.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        del ranks[place]
        for left in range(max(place - 1, 0), min(place + 1, len(ranks))):
            ranks[left] = order.get(parts[left] + parts[left + 1], own)
    return tuple(parts)
