"""Tokenizers of the `tokenizers` library: trained bpe, or an existing file.

gigatoken encodes byte-level BPE with GPT-2's pattern: the same ids in less time
(docs/decisions/0037). `tokenizers` encodes all others. Special tokens are removed from the file
first, because the library would encode their names in a text as the special tokens.
"""

import json
from collections import Counter
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from pydantic import Field

from data_pipeline.errors import DataError
from data_pipeline.system.strict import StrictModel
from data_pipeline.system.strict_json import canonical_json
from data_pipeline.tokenizers.byte_char_word import ByteTokenizer
from data_pipeline.tokenizers.decoding import BYTE_OF, TokenBytes, bytes_are_exact, decoder_steps
from data_pipeline.tokenizers.encoders import (
    GigatokenEncoder,
    reason_without_gigatoken,
    require_gpt2_bpe,
)
from data_pipeline.tokenizers.interface import Tokenizer, checked_ids, token_dtype

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


class PretrainedDescription(StrictModel):
    """Content of `tokenizer.json`."""

    type: Literal["bpe", "file"]
    version: Literal[1] = 1
    end_of_document: int = Field(ge=0)
    vocab_size: int | None = Field(default=None, ge=1, exclude_if=lambda size: size is None)
    """Ids of the model, if it has more of them than the tokenizer has tokens."""
    special_tokens: dict[str, int] = Field(default={}, exclude_if=lambda tokens: not tokens)
    """Those of a model of another program, for the next program. No text encodes to them here."""
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
        self._later_bytes: TokenBytes | None = None
        self.lossless = False
        with suppress(ValueError):
            steps = decoder_steps(content)
            self._later_bytes = TokenBytes(self._library, steps)
            self._first_bytes = TokenBytes(self._library, steps, is_first=True)
            self.lossless = bytes_are_exact(content)
        library = "tokenizers" if self.slow_reason else "gigatoken"
        self.encoder = f"{library} {version(library)}"

    @cached_property
    def _gigatoken(self) -> GigatokenEncoder | None:
        if self.slow_reason:
            return None
        return GigatokenEncoder(canonical_json(self.description.tokenizer))

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> Self:
        """Raises ValueError for content that `to_json` does not write."""
        return cls(PretrainedDescription.model_validate(content))

    def encode(self, text: str) -> np.ndarray:
        """[tokens]. Raises UnicodeEncodeError for lone surrogates."""
        ids = self._gigatoken.encode(text) if self._gigatoken else None
        if ids is None:
            ids = self._encode_with_library(text)
        return ids.astype(token_dtype(self.vocab_size))

    def _encode_with_library(self, text: str) -> np.ndarray:
        text.encode("utf-8")
        try:
            return np.array(self.library_ids(text), dtype=np.uint32)
        except Exception as error:  # the library raises no narrower type
            raise DataError(
                f"the tokenizer has no tokens for {text[:40]!r}: {error}. Add an unknown token "
                "to it, or use another tokenizer."
            ) from error

    def library_ids(self, text: str) -> list[int]:
        """The ids that `tokenizers` gives a text."""
        return self._library.encode(text, add_special_tokens=False).ids

    def unknown_symbols(self, text: str) -> Counter[str]:
        if self._unknown is None:
            return Counter()
        encoding = self._library.encode(text, add_special_tokens=False)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        return Counter(text[start:stop] for id_, (start, stop) in tokens if id_ == self._unknown)

    @cached_property
    def _unknown(self) -> int | None:
        """The id of unknown text, if there is one."""
        return _unknown_id(self.description.tokenizer["model"], self._library.get_vocab())

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        texts = np.split(array, np.flatnonzero(array == self.end_of_document))
        return b"".join(
            self._bytes_of_text(text[text != self.end_of_document].tolist()) for text in texts
        )

    def _bytes_of_text(self, ids: list[int]) -> bytes:
        if self._later_bytes is None:
            return self._library.decode(ids, skip_special_tokens=False).encode()
        first = map(self._first_bytes.__getitem__, ids[:1])
        return b"".join([*first, *map(self._later_bytes.__getitem__, ids[1:])])

    def token_bytes(self) -> np.ndarray:
        lengths = super().token_bytes()
        if self._later_bytes is not None and self.lossless:
            for id_ in range(self.vocab_size):
                if id_ != self.end_of_document:
                    lengths[id_] = len(self._later_bytes[id_])
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
    content: dict[str, Any], source: str, *, end: int | None = None, vocab_size: int | None = None
) -> PretrainedTokenizer:
    """The tokenizer of the library's JSON. `source` names it in errors.

    `end`: the id of end-of-document, which no text may encode to. None: a new id after the
    vocabulary. There is one exception: if the file has exactly one special token, and no text
    encodes to it, end-of-document is the id of that token. `vocab_size`: the number of ids; None is
    that of the tokens. Raises DataError.
    """
    try:
        return _convert(content, end, vocab_size)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{source} is not a usable tokenizer: {error}. Give a tokenizer.json as the tokenizers "
            "library saves it, or that of a dataset or checkpoint of this project."
        ) from error


def _convert(
    content: dict[str, Any], given_end: int | None, vocab_size: int | None
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
            if given_end is not None and (id_ == given_end or token in special)
        },
        tokenizer=plain,
    )
    tokenizer = PretrainedTokenizer(description)

    def is_written(token: str) -> bool:
        """Whether a text can encode to the token."""
        texts = token, f"{token} x{token}"
        return any(id_of[token] in tokenizer.encode(text) for text in texts)

    if moved and any(map(is_written, special)):
        raise ValueError("a text encodes to its special tokens, which precede other tokens")
    if given_end is not None:
        name = next((token for token, id_ in id_of.items() if id_ == given_end), None)
        if name is None or is_written(name):
            raise ValueError(f"{given_end} is not the id of a token that no text has")
        require_same_ids(tokenizer)
        return tokenizer
    end = id_of[special[0]] if len(special) == 1 else new_id
    # Text with unknown characters encodes to the unknown token.
    if end < new_id and end != _unknown_id(model, id_of):
        if is_written(special[0]):
            return tokenizer
        tokenizer = PretrainedTokenizer(description.model_copy(update={"end_of_document": end}))
    require_same_ids(tokenizer)
    return tokenizer


def library_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The JSON of the library with which other programs give the same ids; None for words and ids.

    The special tokens of a tokenizer that was read from such a file are in it again.
    """
    end, special = tokenizer.end_of_document, {}
    if isinstance(tokenizer, PretrainedTokenizer):
        content, special = tokenizer.description.tokenizer, tokenizer.description.special_tokens
    elif isinstance(tokenizer, ByteTokenizer):
        content = _bytes_as_library_json()
    else:
        return None
    name_of = {id_: name for name, id_ in _ids(content).items()}
    special = special or {name_of.get(end, END_OF_TEXT): end}
    added = [
        {"id": id_, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for name, id_ in special.items()
    ]  # fmt: skip
    whole = [*(content.get("added_tokens") or []), *added]
    return {**content, "added_tokens": sorted(whole, key=lambda entry: entry["id"])}


def _bytes_as_library_json() -> dict[str, Any]:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF), merges=[]))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = level
    library.decoder = tokenizers.decoders.ByteLevel()
    content: dict[str, Any] = json.loads(library.to_str())
    return content


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
