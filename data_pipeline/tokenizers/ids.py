"""Token ids that come from elsewhere (music, genomes, other tokenizers), and their names.

The text of ids is their decimal numbers, separated by spaces, "60 62 64": prompts are given
and generated ids are printed like this. With names, text is printed in names, and a prompt may have
both.

`--names FILE` is JSON: an array of names in the order of the ids, an object of ids to names
{"60": "Pitch_60"}, or one of names to ids {"Pitch_60": 60}, such as a vocab.json; or a tokenizer of
ids of a dataset or checkpoint, which has such names.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, Strict, TypeAdapter

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.system.strict_json import parse_json, sha256_of
from data_pipeline.tokenizers.interface import Description, Tokenizer, checked_ids, token_dtype

_DECIMAL = "0123456789 "


class IdDescription(Description):
    type: Literal["ids"] = "ids"
    vocab_size: Annotated[int, Field(ge=2, le=2**32)]
    end_of_document: Annotated[int, Field(ge=0)]
    names: list[str]
    """Name of each id; "" for an id without one. May be shorter than the vocabulary."""


class IdTokenizer(Tokenizer):
    """Ids 0 to vocab_size - 1, with names for none, some or all of them.

    Raises ValueError for an end-of-document id outside the vocabulary and for names that are not
    usable (`require_usable_names`).
    """

    opens_documents = True
    cuts = "space"
    lossless = False  # the decimal numbers are not a text that bits per byte could refer to

    def __init__(self, vocab_size: int, end_of_document: int, names: dict[int, str]) -> None:
        if not 0 <= end_of_document < vocab_size:
            raise ValueError(f"end-of-document id {end_of_document} is not below {vocab_size}")
        require_usable_names(names, vocab_size)
        self.vocab_size, self.end_of_document, self.names = vocab_size, end_of_document, names
        listed = [names.get(id_, "") for id_ in range(max(names, default=-1) + 1)]
        self.description = IdDescription(
            vocab_size=vocab_size, end_of_document=end_of_document, names=listed
        )
        self._id_of = {name: id_ for id_, name in names.items()}

    @classmethod
    def from_description(cls, content: dict[str, Any]) -> "IdTokenizer":
        """Raises ValueError for content that `to_json` does not write."""
        fields = IdDescription.model_validate(content)
        names = {id_: name for id_, name in enumerate(fields.names) if name}
        return cls(fields.vocab_size, fields.end_of_document, names)

    @cached_property
    def digest(self) -> str:
        """Of a vocabulary without names: names are labels, which a model never sees."""
        return sha256_of({**self.description.model_dump(), "names": []})

    def encode(self, text: str) -> np.ndarray:
        """[ids]. Raises ConfigError for anything but ids, and their names, between whitespace."""
        if text.strip(_DECIMAL) or text.isspace():  # which `fromstring` reads as a 0
            ids = np.array([self._id(word) for word in text.split()], dtype=np.int64)
        else:  # decimal numbers only, the text that the readers write
            ids = np.fromstring(text, dtype=np.int64, sep=" ")
        if ids.size and ids.max() >= self.vocab_size:
            raise self._unknown(str(ids[ids.argmax()]))
        if (ids == self.end_of_document).any():
            raise ConfigError(
                f"token id {self.end_of_document} is the end-of-document id, which begins every "
                "document and no text may contain; omit it."
            )
        return ids.astype(token_dtype(self.vocab_size))

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        words = array[array != self.end_of_document].tolist()
        return " ".join(self.names.get(id_) or str(id_) for id_ in words).encode()

    def _id(self, word: str) -> int:
        if word in self._id_of:
            return self._id_of[word]
        if word.isascii() and word.isdecimal() and len(word) < 11:
            return int(word)
        raise self._unknown(word)

    def _unknown(self, word: str) -> ConfigError:
        names = f", and {len(self.names):,} of them have names" if self.names else ""
        return ConfigError(
            f"{printable(word)[:40]!r} is not a token id: the vocabulary has the ids 0 to "
            f"{self.vocab_size - 1}{names}. This model was trained on ids: write them with spaces "
            "between them, such as '60 62 64'; txl data inspect DATASET shows some."
        )


# --- reading names --------------------------------------------------------------------------------


_Name = Annotated[str, Strict()]
_LAYOUTS: TypeAdapter[list[str] | dict[str, int] | dict[int, str]] = TypeAdapter(
    list[_Name] | dict[_Name, Annotated[int, Strict()]] | dict[int, _Name]
)


def read_names(path: Path) -> dict[int, str]:
    """Id to name. Raises DataError for a file that has no such content."""
    try:
        content = parse_json(path.read_text("utf-8"))
        if isinstance(content, dict) and content.get("type") == "ids":
            content = content.get("names")
        layout = _LAYOUTS.validate_python(content)
        if isinstance(layout, list):
            return {id_: name for id_, name in enumerate(layout) if name}
        pairs = ((a, b) if isinstance(a, int) else (b, a) for a, b in layout.items())
        names = {int(id_): str(name) for id_, name in pairs}
        if len(names) < len(content):
            raise ValueError("an id has two names")
        return names
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} has no names of token ids: {printable(str(error))[:300]}. Give a JSON array "
            'of names, {"60": "Pitch_60", ...}, or {"Pitch_60": 60, ...}.'
        ) from error


def require_usable_names(names: dict[int, str], vocab_size: int) -> None:
    """Raise ValueError unless text in these names is encoded to the same ids again.

    Names are therefore distinct, without whitespace, and no decimal number.
    """
    for id_, name in names.items():
        if not 0 <= id_ < vocab_size:
            raise ValueError(f"{name[:40]!r} names id {id_}, the vocabulary has {vocab_size} ids")
        if name.split() != [name] or (name.isascii() and name.isdecimal()):
            raise ValueError(f"the name {name[:40]!r} of id {id_} has whitespace or is a number")
    if len({*names.values()}) < len(names):
        raise ValueError("two ids have the same name")
    "".join(names.values()).encode()  # raises UnicodeEncodeError for lone surrogates
