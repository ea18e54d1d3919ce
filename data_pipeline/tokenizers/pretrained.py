"""Tokenizers of the `tokenizers` library: trained here as bpe, or brought as a file.

Byte-level BPE split by GPT-2's pattern is encoded by tiktoken's core: the same ids in less time.
Everything else goes through `tokenizers` itself. Special tokens are taken out of the file before
it encodes, because the library turns their names in a text into the real tokens.
"""

from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import tiktoken
import tokenizers
from pydantic import Field

from data_pipeline.errors import DataError
from data_pipeline.storage.strict_json import canonical, sha256_of
from data_pipeline.storage.strict_model import StrictModel
from data_pipeline.tokenizers.interface import Cuts, checked_ids, token_dtype
from data_pipeline.tokenizers.tiktoken_ranks import GPT2_PATTERN, ranked_bytes

UNUSED_SPECIAL = "<|unused|>"
HARD_STRINGS = (
    "don't I'LL we've it's they'd you're 'tis '' 's's",
    "  two   three    spaces  \t\ttabs \n\n lines \r\n CRLF \r\n\r\n end   ",
    "1 23 456 7890 ½ ² ٣٤ १२ Ⅻ 3.14159e-10",
    "naïve Ångström ﬁ ǅ ß İı e\u0301 \u00a0\u2003\u3000\u2028x\u0085y\u200bz\ufeff",
    "السلام עליכם \u202eleft\u202c हिन्दी ไทย 潮は満ちる 한국어",
    "👩‍👩‍👧‍👦 🇺🇳 👍🏽 \U000e0001\U0010ffff",
    f"{UNUSED_SPECIAL} x{UNUSED_SPECIAL}{UNUSED_SPECIAL[1:]}",
    "\x00\x01\x1b[31m\x1c\x1d\x7f\x80",
    "<|endoftext|> <unk><s></s> [CLS] <eos> ĠĊ Ġthe",
    "snake_case->x+=1;//!!??...---***===" + "a" * 300 + " " * 300 + "." * 300,
)
"""Where implementations of byte-level BPE have differed; whole tokenizers are compared on them."""


class PretrainedDescription(StrictModel):
    """`tokenizer.json` of a dataset."""

    type: Literal["bpe", "file"]
    version: Literal[1] = 1
    end_of_document: int = Field(ge=0)
    tokenizer: dict[str, Any]
    """The library's own JSON, without special tokens, truncation, padding and templates."""


class PretrainedTokenizer:
    """A tokenizer of the library behind this project's interface.

    Raises ValueError for content that is none, and for ids that are not 0 to vocab_size - 1.
    """

    opens_documents = True

    def __init__(self, description: PretrainedDescription) -> None:
        self._description = description
        self.end_of_document = description.end_of_document
        content = description.tokenizer
        self._library = library_tokenizer(content)
        tokens = self._library.get_vocab(with_added_tokens=True)
        ids = sorted({*tokens.values(), self.end_of_document})
        if ids != [*range(len(ids))] or len({*tokens.values()}) != len(tokens):
            raise ValueError(f"its ids are not 0 to {len(tokens) - 1}, each once")
        if content["model"].get("dropout"):
            raise ValueError("its model drops merges at random: the same text has many encodings")
        self.vocab_size = len(ids)
        end = next((token for token, id_ in tokens.items() if id_ == self.end_of_document), None)
        self._core: tiktoken.Encoding | None = None
        try:
            ranks = ranked_bytes(content, leave_out=end)
        except ValueError as reason:
            if description.type == "bpe":
                raise ValueError(f"it is no byte-level BPE of this version: {reason}") from reason
        else:
            self._bytes_of = {id_: token for token, id_ in ranks.items()}
            # Never encoded to, but without any special token tiktoken looks for one, the empty one,
            # at every character.
            unused = {UNUSED_SPECIAL: max(ranks.values()) + 1}
            self._core = tiktoken.Encoding(
                "txl", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=unused
            )

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> Self:
        """Raises ValueError for any other content than `to_json` writes."""
        return cls(PretrainedDescription.model_validate(content))

    @property
    def lossless(self) -> bool:
        return self._core is not None

    @property
    def cuts(self) -> Cuts:
        return "space" if self._core else "never"

    @cached_property
    def digest(self) -> str:
        return sha256_of(self._description.model_dump())

    def encode(self, text: str) -> np.ndarray:
        """[tokens]. Raises UnicodeEncodeError for lone surrogates."""
        if self._core:
            ids = self._core.encode_to_numpy(text, disallowed_special=())
        else:
            text.encode("utf-8")
            try:
                ids = np.array(self.library_ids(text), dtype=np.uint32)
            except Exception as error:  # the library raises nothing narrower
                raise DataError(
                    f"the tokenizer has no tokens for {text[:40]!r}: {error}. Give it a token for "
                    "what it does not know, or use another tokenizer."
                ) from error
        return ids.astype(token_dtype(self.vocab_size))

    def library_ids(self, text: str) -> list[int]:
        """What `tokenizers` makes of a text."""
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: npt.ArrayLike) -> str:
        if self._core:
            return self.decode_bytes(ids).decode("utf-8", errors="replace")
        array = checked_ids(ids, self.vocab_size)
        kept = array[array != self.end_of_document].tolist()
        return self._library.decode(kept, skip_special_tokens=False)

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        if not self._core:
            return self.decode(ids).encode()
        array = checked_ids(ids, self.vocab_size)
        kept = array[array != self.end_of_document].tolist()
        return b"".join(map(self._bytes_of.__getitem__, kept))

    def token_bytes(self) -> np.ndarray:
        """As the interface says; if not `lossless`, what the token adds to the text behind itself.

        A tokenizer may drop a word's blank at the start of a text, or normalise: then the sum is an
        estimate, and so are bits per byte.
        """
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for id_ in range(self.vocab_size):
            if id_ == self.end_of_document:
                continue
            if self._core:
                lengths[id_] = len(self._bytes_of[id_])
            else:
                one, two = self.decode_bytes([id_]), self.decode_bytes([id_, id_])
                lengths[id_] = max(0, len(two) - len(one))
        return lengths

    def to_json(self) -> str:
        return canonical(self._description.model_dump())


def library_tokenizer(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """Raises ValueError for what the library cannot read."""
    try:
        return tokenizers.Tokenizer.from_str(canonical(content))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception, and a panic of its Rust that is not even that
        raise ValueError(f"tokenizers cannot read it: {error}") from error


def is_foreign(content: object) -> bool:
    """Whether this is the library's JSON, not a `tokenizer.json` of this project."""
    return isinstance(content, dict) and "model" in content and "type" not in content


def adopt(content: dict[str, Any], where: str) -> PretrainedTokenizer:
    """The tokenizer of the library's JSON.

    The end of a document is a new id behind its vocabulary; or, if the file has exactly one special
    token, this is not what the model gives for text it does not know, and no text gives it, this
    token's own id. Raises DataError.
    """
    try:
        return _adopted(content)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is no tokenizer that can be used: {error}. Give a tokenizer.json as the "
            "tokenizers library saves it, or of a dataset or checkpoint of this project."
        ) from error


def _adopted(content: dict[str, Any]) -> PretrainedTokenizer:
    added = content.get("added_tokens") or []
    special = [entry["content"] for entry in added if entry["special"]]
    plain = {
        **content,
        "added_tokens": [entry for entry in added if not entry["special"]],
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }
    before = library_tokenizer(content).get_vocab(with_added_tokens=True)
    after = library_tokenizer(plain).get_vocab(with_added_tokens=True)
    if moved := sorted(token for token, id_ in after.items() if before.get(token) != id_):
        raise ValueError(f"its special tokens stand before others, such as {moved[0][:40]!r}")
    new = max(after.values(), default=-1) + 1
    given = before[special[0]] if len(special) == 1 else new
    if given == _unknown(content["model"], before):
        given = new
    description = PretrainedDescription(type="file", end_of_document=new, tokenizer=plain)
    if given < new:  # in the vocabulary itself: see whether a text can give it
        tokenizer = PretrainedTokenizer(description)
        if given in tokenizer.encode(f"{special[0]} x{special[0]}"):
            return tokenizer
        description = description.model_copy(update={"end_of_document": given})
    tokenizer = PretrainedTokenizer(description)
    require_same_ids(tokenizer, [])
    return tokenizer


def _unknown(model: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The id for text that the model does not know: Unigram has its number, others its token."""
    by_number: int | None = model.get("unk_id")
    return ids.get(model.get("unk_token") or "") if by_number is None else by_number


def require_same_ids(tokenizer: PretrainedTokenizer, texts: list[str]) -> None:
    """Raises DataError for a text without ids, or whose ids differ from those of `tokenizers`."""
    for text in [*HARD_STRINGS, *texts]:
        if tokenizer.encode(text).tolist() != tokenizer.library_ids(text):
            raise DataError(
                f"tiktoken and tokenizers differ on {text[:60]!r}. Their versions do not go "
                "together: install those of constraints.txt and run this again."
            )
