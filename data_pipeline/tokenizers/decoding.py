"""The bytes of the tokens of a library's `tokenizer.json`, which follow from its decoder.

A token may be two thirds of a character, which is no text: text of tokens is joined as bytes. Known
are byte-level decoders, where each character represents a byte, and those of SentencePiece:
Metaspace, and pieces in which ▁ is a space (Replace) with tokens `<0x0A>` for bytes (ByteFallback).
Some remove the space that the encoder puts before a text from the first token (Metaspace, Strip).

Source: `decode_chain` in tokenizers/src/decoders and tokenizers/src/pre_tokenizers of the library.
"""

import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(rb"^<0x([0-9a-fA-F]{2})>\Z")


def _byte_of_character() -> dict[str, int]:
    """The character for each byte in such files: itself if printable, else chr(256), chr(257)..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


BYTE_OF = _byte_of_character()
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in BYTE_OF.items()})


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token is written in. Tokens with other characters are text."""
    is_text = not BYTE_OF.keys() >= {*token}
    return token.encode() if is_text else token.translate(_TO_LATIN_1).encode("latin-1")


def decoder_steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the decoder of a library's JSON.

    Raises ValueError for a decoder in which the bytes of a token depend on other tokens.
    """
    decoder = content.get("decoder") or {"type": "none"}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    pieces = kinds
    # Before Fuse, Strip is applied to every token.
    if kinds[-2:] == ["Fuse", "Strip"] and (steps[-1]["start"], steps[-1]["stop"]) == (1, 0):
        pieces = kinds[:-1]
    pieces = [kind for kind in pieces if kind != "Fuse"]
    is_known = {*pieces} <= {"Replace", "Metaspace", "ByteFallback"} or pieces == ["ByteLevel"]
    if not is_known or any("Regex" in step.get("pattern", ()) for step in steps):
        raise ValueError(f"the bytes of its tokens are not known (decoder {', '.join(kinds)})")
    return [step for step in steps if step["type"] != "Fuse"]


class TokenBytes(dict[int, bytes]):
    """The bytes of each id, which are computed when they are needed.

    `is_first`: of the first token of a text.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, steps: list[dict[str, Any]], *, is_first: bool = False
    ) -> None:
        super().__init__()
        self._library, self._steps, self._is_first = library, steps, is_first

    def __missing__(self, id_: int) -> bytes:
        token = self._library.id_to_token(id_)
        if token is None:  # an id that the model has and its tokenizer has not
            return b""
        raw = token.encode()
        for step in self._steps:
            match step["type"]:
                case "ByteLevel":
                    raw = byte_level_bytes(token)
                case "Replace":
                    pattern = step["pattern"]["String"].encode()
                    raw = raw.replace(pattern, step["content"].encode())
                case "Metaspace":
                    is_dropped = self._is_first and step["prepend_scheme"] != "never"
                    raw = raw.replace(step["replacement"].encode(), b"" if is_dropped else b" ")
                case "ByteFallback":
                    raw = _BYTE_TOKEN.sub(lambda byte: bytes.fromhex(byte[1].decode()), raw)
                case "Strip" if self._is_first:
                    raw = raw.removeprefix(step["content"].encode())
        self[id_] = raw
        return raw


def bytes_are_exact(content: dict[str, Any]) -> bool:
    """Whether the bytes of the tokens of any text add up to those of the text.

    This holds for byte-level BPE that does not normalize. Others replace characters, drop or add
    spaces, or write ▁ for a space, so that a ▁ of the text counts as one byte.
    """
    model, split = content["model"], content.get("pre_tokenizer") or {}
    normalizer = content.get("normalizer") or {"normalizers": []}
    steps = split.get("pretokenizers", [split])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        [step["type"] for step in decoder_steps(content)] == ["ByteLevel"]
        and normalizer.get("normalizers") == []
        and [step["add_prefix_space"] for step in byte_level] == [False]
        and all(
            step["type"] in ("ByteLevel", "Digits")
            or (step["type"] == "Split" and step["behavior"] != "Removed")
            for step in steps
        )
        and model.get("type") == "BPE"
        and model["vocab"].keys() >= BYTE_OF.keys()
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and all(
            byte_level_bytes(added["content"]) == added["content"].encode()
            and not (added["lstrip"] or added["rstrip"])
            for added in content.get("added_tokens") or ()
        )
    )
