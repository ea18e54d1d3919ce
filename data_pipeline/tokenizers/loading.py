"""Load `tokenizer.json`, and compare two of them: do they give token ids the same meaning?"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from data_pipeline.errors import DataError, UnreadableError, printable
from data_pipeline.system.remote_path import DatasetPath, dataset_path
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.strict_json import parse_json
from data_pipeline.tokenizers.byte_char_word import ByteTokenizer, CharTokenizer, WordTokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.interface import Tokenizer

MAX_TOKENIZER_BYTES = 256 * 2**20


def _pretrained(content: dict[str, Any]) -> Tokenizer:
    # Imported here: tiktoken and tokenizers take 0.1 s to import.
    from data_pipeline.tokenizers.pretrained import PretrainedTokenizer

    return PretrainedTokenizer.from_description(content)


KINDS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "byte": ByteTokenizer.from_description,
    "char": CharTokenizer.from_description,
    "word": WordTokenizer.from_description,
    "bpe": _pretrained,
    "file": _pretrained,
    "ids": IdTokenizer.from_description,
}


def load_tokenizer(source: str | DatasetPath | dict[str, Any]) -> Tokenizer:
    """Load the tokenizer from the path or URL of a `tokenizer.json`, or from its parsed content.

    Raises DataError if it is missing, damaged, or of an unknown kind or version.
    """
    if isinstance(source, dict):
        return tokenizer_of(source, source="the tokenizer description")
    path = dataset_path(source)
    return tokenizer_of(read_description(path), source=str(path))


def read_description(path: DatasetPath) -> Any:
    """Parse the JSON of a tokenizer file without validating it. Raises DataError."""
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(
                f"{path} is larger than {MAX_TOKENIZER_BYTES:,} bytes, too large for a tokenizer."
            )
        return parse_json(path.read_text("utf-8"))
    except OSError as error:
        problem = f"{path}: the tokenizer cannot be read ({error.strerror})."
        if is_read_failure(error):
            advice = "Check the disk or network and run this again."
            raise UnreadableError(f"{problem} {advice}") from error
        raise DataError(
            f"{problem} A complete dataset has one; create it again: txl prepare INPUT --out DIR."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}). It was edited or damaged; create the dataset "
            "again: txl prepare INPUT --out DIR."
        ) from error


def tokenizer_of(content: object, *, source: str) -> Tokenizer:
    """The tokenizer of parsed JSON. `source` names it in errors. Raises DataError."""
    if not isinstance(content, dict):
        raise _invalid(source, f"it is {type(content).__name__}, not an object")
    kind, version = content.get("type"), content.get("version")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _invalid(source, f"its type is {kind!r}, supported are {', '.join(KINDS)}")
    if type(version) is not int or version != 1:
        raise _invalid(source, f"its version is {version!r}, this version of txl reads 1")
    try:
        return KINDS[kind](content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _invalid(source, f"{field}: {first['msg']}") from error
    except ValueError as error:
        raise _invalid(source, str(error)) from error


def _invalid(source: str, reason: str) -> DataError:
    return DataError(
        f"{source} is not a tokenizer that this version can read: {reason[:300]}. It was edited, "
        "damaged, or written by a newer txl. Restore it from a copy."
    )


# --- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """The `tokenizer.json` of a dataset or checkpoint, and its digest in the manifest."""

    path: DatasetPath
    digest: str

    def load(self) -> Tokenizer | None:
        """None if the file cannot be read, or is another one than the manifest says."""
        try:
            tokenizer = load_tokenizer(self.path)
        except DataError:
            return None
        return tokenizer if tokenizer.digest == self.digest else None


def differences(first: StoredTokenizer, other: StoredTokenizer) -> str:
    """What differs, such as "vocab_size 131 and 132"; "" if ids have the same meaning in both."""
    if first.digest == other.digest:
        return ""
    loaded, other_loaded = first.load(), other.load()
    if loaded is None or other_loaded is None:
        return f"digest {first.digest} and {other.digest}"
    return describe_differences(loaded, other_loaded)


def describe_differences(first: Tokenizer, other: Tokenizer) -> str:
    """As `differences`, with the names of ids, for two tokenizers that are not equal."""
    types = [json.loads(each.to_json())["type"] for each in (first, other)]
    facts: list[tuple[str, object, object]] = [
        ("type", *types),
        ("vocab_size", first.vocab_size, other.vocab_size),
        ("end_of_document", first.end_of_document, other.end_of_document),
    ]
    for id_ in range(min(first.vocab_size, other.vocab_size)):
        texts = [each.decode_bytes([id_]) for each in (first, other)]
        if texts[0] != texts[1]:
            shown = [repr(printable(text.decode("utf-8", errors="replace"))[:40]) for text in texts]
            facts.append((f"the text of id {id_} is", shown[0], shown[1]))
            break
    parts = [f"{name} {one} and {two}" for name, one, two in facts if one != two]
    return ", ".join(parts) or "settings of the tokenizer"
