"""Tokenizers of the `tokenizers` library: trained bpe, or an existing file.

gigatoken encodes byte-level BPE with GPT-2's pattern: the same ids in less time
(docs/decisions/0037). `tokenizers` encodes all others. Special tokens are removed from the file
first, because the library would encode their names in a text as the special tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from pydantic import Field

from data_pipeline.errors import DataError
from data_pipeline.system.strict_json import canonical_json
from data_pipeline.tokenizers.byte_char_word import ByteTokenizer
from data_pipeline.tokenizers.encoders import (
    BYTE_OF,
    GigatokenEncoder,
    reason_without_gigatoken,
    require_gpt2_bpe,
)
from data_pipeline.tokenizers.interface import Description, Tokenizer, checked_ids, token_dtype

HARD_STRINGS = (
    "don't I'LL we've it's they'd you're 'tis '' 's's",
    "  two   three    spaces  \t\ttabs \n\n lines \r\n CRLF \r\n\r\n end   ",
    "1 23 456 7890 ½ ² ٣٤ १२ Ⅻ 3.14159e-10",
    "naïve Ångström ﬁ ǅ ß İı e\u0301 \u00a0\u2003\u3000\u2028x\u0085y\u200bz\ufeff",
    "السلام עליכם \u202eleft\u202c हिन्दी ไทย 潮は満ちる 한국어",
    "👩‍👩‍👧‍👦 🇺🇳 👍🏽 \U000e0001\U0010ffff",
    "\x00\x01\x1b[31m\x1c\x1d\x7f\x80",
    "<|endoftext|> <unk><s></s> [CLS] <eos> ĠĊ Ġthe",
    "snake_case->x+=1;//!!??...---***===" + "a" * 300 + " " * 300 + "." * 300,
)
"""Texts on which implementations of byte-level BPE have differed, to compare two of them."""


END_OF_TEXT = "<|endoftext|>"
"""The name that other programs get for an end-of-document without one."""


class PretrainedDescription(Description):
    type: Literal["bpe", "file"]
    end_of_document: int = Field(ge=0)
    vocab_size: int | None = Field(default=None, ge=1, exclude_if=lambda size: size is None)
    """Ids of the model, if it has more of them than the tokenizer has tokens."""
    special_tokens: dict[str, int] = Field(default={}, exclude_if=lambda tokens: not tokens)
    """Those of a model of another program, for the next program. No text encodes to them here."""
    ends_of_text: list[int] = Field(default=[], exclude_if=lambda ids: not ids)
    """Those of a model of another program whose texts begin with `end_of_document`."""
    tokenizer: dict[str, Any]
    """The JSON of the library, without special tokens, truncation, padding and templates."""


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of the library with the interface of this project.

    Raises ValueError for content that is not a tokenizer, for ids other than 0 to vocab_size - 1,
    and for a model with dropout.
    """

    description: PretrainedDescription
    opens_documents = True

    def __init__(self, description: PretrainedDescription) -> None:
        self.description = description
        self.end_of_document = description.end_of_document
        self.ends_of_text = tuple(description.ends_of_text)
        content = description.tokenizer
        self._library = library_tokenizer(canonical_json(content))
        tokens = self._library.get_vocab(with_added_tokens=True)
        ids = sorted({*tokens.values(), self.end_of_document})
        self.vocab_size = description.vocab_size or len(ids)
        has_gaps = description.vocab_size is None and ids != [*range(len(ids))]
        if has_gaps or ids[-1] >= self.vocab_size or len({*tokens.values()}) != len(tokens):
            raise ValueError(f"its ids are not 0 to {self.vocab_size - 1}, each once")
        if content["model"].get("dropout"):
            raise ValueError("its model has dropout: the same text has several encodings")
        end = next((token for token, id_ in tokens.items() if id_ == self.end_of_document), None)
        self.slow_reason, self.cuts = reason_without_gigatoken(), "space"
        try:
            require_gpt2_bpe(content, leave_out=end)
        except ValueError as reason:
            if description.type == "bpe":
                raise ValueError(f"it is not byte-level BPE of this version: {reason}") from reason
            self.slow_reason, self.cuts = str(reason), "never"
        unknown = _unknown_id(content["model"], tokens)
        self.unknown_id = None if unknown == self.end_of_document else unknown
        self._steps = decoder_steps(content)
        self.lossless = self._steps is not None and bytes_are_exact(content, self._steps)
        library = "tokenizers" if self.slow_reason else "gigatoken"
        self.encoder = f"{library} {version(library)}"

    @cached_property
    def _bytes_of(self) -> Callable[[int, bool], bytes] | None:
        """The bytes of an id, or of the first id of a text; None if they depend on other ids."""
        if self._steps is None:
            return None
        return cache(partial(bytes_of_token, self._library, self._steps))

    @cached_property
    def _gigatoken(self) -> GigatokenEncoder | None:
        content = canonical_json(self.description.tokenizer)
        return None if self.slow_reason else GigatokenEncoder(content)

    def encode(self, text: str) -> np.ndarray:
        """[tokens]. Raises UnicodeEncodeError for lone surrogates."""
        ids = self._gigatoken.encode(text) if self._gigatoken else None
        if ids is None:
            text.encode("utf-8")
            try:
                ids = np.array(self.library_ids(text), dtype=np.uint32)
            except Exception as error:  # the library raises no narrower type
                raise DataError(
                    f"the tokenizer has no tokens for {text[:40]!r}: {error}. Add an unknown token "
                    "to it, or use another tokenizer."
                ) from error
        return ids.astype(token_dtype(self.vocab_size))

    def library_ids(self, text: str) -> list[int]:
        """The ids that `tokenizers` gives a text."""
        return self._library.encode(text, add_special_tokens=False).ids

    def unknown_symbols(self, text: str) -> Counter[str]:
        if self.unknown_id is None:
            return Counter()
        encoding = self._library.encode(text, add_special_tokens=False)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        return Counter(text[start:stop] for id_, (start, stop) in tokens if id_ == self.unknown_id)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        texts = np.split(array, np.flatnonzero(array == self.end_of_document))
        return b"".join(
            self._bytes_of_text(text[text != self.end_of_document].tolist()) for text in texts
        )

    def _bytes_of_text(self, ids: list[int]) -> bytes:
        if not self._bytes_of:
            return self._library.decode(ids, skip_special_tokens=False).encode()
        return b"".join(self._bytes_of(id_, not place) for place, id_ in enumerate(ids))

    def token_bytes(self) -> np.ndarray:
        lengths = super().token_bytes()
        if self._bytes_of and self.lossless:
            lengths[:] = [len(self._bytes_of(id_, False)) for id_ in range(self.vocab_size)]
            lengths[self.end_of_document] = 0
        return lengths


def library_tokenizer(content: str) -> tokenizers.Tokenizer:
    """The tokenizer of the library's JSON. Raises ValueError if the library cannot read it."""
    try:
        return tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Exception, or a Rust panic, which is a BaseException only
        raise ValueError(f"tokenizers cannot read it: {error}") from error


def is_library_json(content: object) -> bool:
    """Whether this is the JSON of the library, not a `tokenizer.json` of this project."""
    return isinstance(content, dict) and "model" in content and "type" not in content


def from_library_json(
    content: dict[str, Any],
    source: str,
    *,
    end: int | None = None,
    ends_of_text: Sequence[int] = (),
    vocab_size: int | None = None,
) -> PretrainedTokenizer:
    """The tokenizer of the library's JSON. `source` names it in errors.

    `end`: the id of end-of-document, which no text may encode to. None: a new id after the
    vocabulary. There is one exception: if the file has exactly one special token, and no text
    encodes to it, end-of-document is the id of that token. `ends_of_text`: other ids that end a
    generated text. `vocab_size`: the number of ids; None is that of the tokens. Raises DataError.
    """
    try:
        return _convert(content, end, [*ends_of_text], vocab_size)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{source} is not a usable tokenizer: {error}. Give a tokenizer.json as the tokenizers "
            "library saves it, or that of a dataset or checkpoint of this project."
        ) from error


def _convert(
    content: dict[str, Any], given_end: int | None, ends_of_text: list[int], vocab_size: int | None
) -> PretrainedTokenizer:
    added = content.get("added_tokens") or []
    special = [entry["content"] for entry in added if entry["special"]]
    plain = {
        **content,
        "added_tokens": [entry for entry in added if not entry["special"]],
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }
    id_of = _ids(content)
    model = content["model"]
    if moved := _moved(plain, id_of):
        # Other tokens follow special ones (Qwen 2.5). To keep the ids, special tokens become tokens
        # of the model, to which no merge leads.
        last = max(id_of[token] for token in moved)
        earlier = {token: id_ for token, id_ in id_of.items() if id_ < last}
        plain["model"] = {**model, "vocab": {**model["vocab"], **earlier}}
        if model.get("type") != "BPE" or _moved(plain, id_of):
            raise ValueError(f"its special tokens precede other tokens, such as {moved[0][:40]!r}")
    new_id = max(_ids(plain).values(), default=-1) + 1
    description = PretrainedDescription(
        type="file",
        end_of_document=new_id if given_end is None else given_end,
        vocab_size=vocab_size,
        special_tokens={
            token: id_
            for token, id_ in id_of.items()
            if given_end is not None and (id_ in (given_end, *ends_of_text[:1]) or token in special)
        },
        ends_of_text=[id_ for id_ in ends_of_text if id_ in id_of.values()],
        tokenizer=plain,
    )
    tokenizer = PretrainedTokenizer(description)

    def is_written(token: str) -> bool:
        texts = token, f"{token} x{token}"
        return any(id_of[token] in tokenizer.encode(text) for text in texts)

    if moved and any(map(is_written, special)):
        raise ValueError("a text encodes to its special tokens, which precede other tokens")
    if given_end is not None:
        name = next((token for token, id_ in id_of.items() if id_ == given_end), None)
        if name is None or is_written(name):
            raise ValueError(f"{given_end} is not the id of a token that no text has")
        if ends_of_text and ends_of_text[0] not in id_of.values():
            raise ValueError(f"{ends_of_text[0]}, which ends a text, is not the id of a token")
    elif len(special) == 1:
        end = id_of[special[0]]
        # Text with unknown characters encodes to the unknown token.
        if end < new_id and end != _unknown_id(model, id_of):
            if is_written(special[0]):
                return tokenizer
            tokenizer = PretrainedTokenizer(description.model_copy(update={"end_of_document": end}))
    require_same_ids(tokenizer)
    return tokenizer


def library_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The JSON of the library with which other programs give the same ids; None for characters,
    words and ids.

    The special tokens of a tokenizer that was read from such a file are in it again. Raises
    DataError if the library would give a token another id.
    """
    end, special = tokenizer.end_of_document, {}
    if isinstance(tokenizer, PretrainedTokenizer):
        content, special = tokenizer.description.tokenizer, tokenizer.description.special_tokens
    elif isinstance(tokenizer, ByteTokenizer):
        library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF), merges=[]))
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = level
        library.decoder = tokenizers.decoders.ByteLevel()
        content = json.loads(library.to_str())
    else:
        return None
    ids = _ids(content) | special
    name = next((token for token, id_ in ids.items() if id_ == end), END_OF_TEXT)
    while ids.get(name, end) != end:  # the vocabulary has this name, for another id
        name = f"<{name}>"
    special = special or {name: end}
    added: list[dict[str, Any]] = [
        {"id": id_, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for name, id_ in special.items()
    ]  # fmt: skip
    added += content.get("added_tokens") or []
    whole = {**content, "added_tokens": sorted(added, key=lambda entry: entry["id"])}
    if moved := _moved(whole, ids | special):
        raise DataError(
            f"the tokenizers library gives {moved[0][:40]!r} another id than this model: the file "
            "for other programs needs ids without gaps. Export the model without --format"
        )
    if tokenizer.ends_of_text:  # of a model whose tokenizer puts this token before every text
        begin = {"SpecialToken": {"id": name, "type_id": 0}}
        whole["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, *({"Sequence": {"id": each, "type_id": 0}} for each in "AB")],
            "special_tokens": {name: {"id": name, "ids": [end], "tokens": [name]}},
        }
    return whole


def _ids(content: dict[str, Any]) -> dict[str, int]:
    return library_tokenizer(canonical_json(content)).get_vocab(with_added_tokens=True)


def _moved(content: dict[str, Any], id_of: dict[str, int]) -> list[str]:
    """The tokens that have other ids than `id_of`, sorted."""
    return sorted(token for token, id_ in _ids(content).items() if id_of.get(token) != id_)


def _unknown_id(model: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The id of the unknown token: Unigram stores the id, other models the token."""
    unk_id: int | None = model.get("unk_id")
    return ids.get(model.get("unk_token") or "") if unk_id is None else unk_id


def require_same_ids(tokenizer: PretrainedTokenizer) -> None:
    """Raises DataError if `tokenizers` gives other ids for a text than the encoder, or none."""
    for text in HARD_STRINGS:
        if tokenizer.encode(text).tolist() != tokenizer.library_ids(text):
            raise DataError(
                f"{tokenizer.encoder} and tokenizers differ on {text[:60]!r}. Their versions are "
                "incompatible: install those of constraints.txt and run this again."
            )


# --- the bytes of tokens ------------------------------------------------------------------------


# A token may be two thirds of a character, which is no text, so text of tokens is joined as bytes.
# Known are byte-level decoders, where each character represents a byte, and those of SentencePiece:
# Metaspace, and pieces in which ▁ is a space (Replace) with tokens `<0x0A>` for bytes
# (ByteFallback). Some remove the space that the encoder puts before a text from the first token
# (Metaspace, Strip). Source: `decode_chain` in tokenizers/src/decoders and
# tokenizers/src/pre_tokenizers of the library.
_BYTE_TOKEN = re.compile(rb"^<0x([0-9a-fA-F]{2})>\Z")
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in BYTE_OF.items()})


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token is written in. Tokens with other characters are text."""
    is_text = not BYTE_OF.keys() >= {*token}
    return token.encode() if is_text else token.translate(_TO_LATIN_1).encode("latin-1")


def decoder_steps(content: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The steps of the decoder of a library's JSON; None if bytes of a token depend on others."""
    decoder = content.get("decoder") or {"type": "none"}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    # Before Fuse, Strip is applied to every token.
    if kinds[-2:] == ["Fuse", "Strip"] and (steps[-1]["start"], steps[-1]["stop"]) == (1, 0):
        kinds.pop()
    pieces = [kind for kind in kinds if kind != "Fuse"]
    is_known = {*pieces} <= {"Replace", "Metaspace", "ByteFallback"} or pieces == ["ByteLevel"]
    if not is_known or any("Regex" in step.get("pattern", ()) for step in steps):
        return None
    return [step for step in steps if step["type"] != "Fuse"]


def bytes_of_token(
    library: tokenizers.Tokenizer, steps: list[dict[str, Any]], id_: int, is_first: bool
) -> bytes:
    """The bytes of a token, or of the first token of a text."""
    token = library.id_to_token(id_)
    if token is None:  # an id that the model has and its tokenizer has not
        return b""
    raw = token.encode()
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                raw = byte_level_bytes(token)
            case "Replace":
                pattern = step["pattern"]["String"].encode()
                raw = raw.replace(pattern, step["content"].encode())
            case "Metaspace":
                is_dropped = is_first and step["prepend_scheme"] != "never"
                raw = raw.replace(step["replacement"].encode(), b"" if is_dropped else b" ")
            case "ByteFallback":
                raw = _BYTE_TOKEN.sub(lambda byte: bytes.fromhex(byte[1].decode()), raw)
            case "Strip" if is_first:
                raw = raw.removeprefix(step["content"].encode())
    return raw


def bytes_are_exact(content: dict[str, Any], decoder: list[dict[str, Any]]) -> bool:
    """Whether the bytes of the tokens of any text add up to those of the text.

    This holds for byte-level BPE that does not normalize. Others replace characters, drop or add
    spaces, or write ▁ for a space, so that a ▁ of the text counts as one byte.
    """
    model, split = content["model"], content.get("pre_tokenizer") or {}
    normalizer = content.get("normalizer") or {"normalizers": []}
    steps = split.get("pretokenizers", [split])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        [step["type"] for step in decoder] == ["ByteLevel"]
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
