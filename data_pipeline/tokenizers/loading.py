"""Reading `tokenizer.json`: strict, and refused by name. Every kind has its line in KINDS."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from data_pipeline.errors import DataError
from data_pipeline.storage import strict_json
from data_pipeline.storage.remote_path import DatasetPath, dataset_path
from data_pipeline.storage.source_errors import is_unread
from data_pipeline.tokenizers.byte import ByteTokenizer
from data_pipeline.tokenizers.char import CharTokenizer
from data_pipeline.tokenizers.interface import Tokenizer
from data_pipeline.tokenizers.word import WordTokenizer

MAX_TOKENIZER_BYTES = 256 * 2**20


def _pretrained(content: dict[str, Any]) -> Tokenizer:
    from data_pipeline.tokenizers.pretrained import PretrainedTokenizer  # two libraries, 0.1 s

    return PretrainedTokenizer.from_description(content)


KINDS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "byte": ByteTokenizer.from_description,
    "char": CharTokenizer.from_description,
    "word": WordTokenizer.from_description,
    "bpe": _pretrained,
    "file": _pretrained,
}


def load_tokenizer(source: str | DatasetPath | dict[str, Any]) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` or of its parsed content.

    Raises DataError when it is missing, damaged, or of a kind or version unknown here.
    """
    if isinstance(source, dict):
        return _from_description(source, "the tokenizer description")
    path = dataset_path(source)
    return _from_description(read_description(path), str(path))


def read_description(path: DatasetPath) -> Any:
    """The JSON of a tokenizer's file, whatever it holds. Raises DataError."""
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(f"{path} is larger than {MAX_TOKENIZER_BYTES:,} bytes: no tokenizer.")
        return strict_json.parse(path.read_text("utf-8"))
    except OSError as error:
        advice = (
            "Run it again when the disk or network is well."
            if is_unread(error)
            else "A complete dataset has one; re-create it with txl prepare INPUT --out DIR."
        )
        raise DataError(
            f"{path}: the tokenizer cannot be read ({error.strerror}). {advice}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}). It was edited or damaged; re-create the dataset "
            "with txl prepare INPUT --out DIR."
        ) from error


def _from_description(content: object, where: str) -> Tokenizer:
    if not isinstance(content, dict):
        raise _refused(where, f"it is {type(content).__name__}, not an object")
    kind, version = content.get("type"), content.get("version")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _refused(where, f"its type is {kind!r}, known are {', '.join(KINDS)}")
    if type(version) is not int or version != 1:
        raise _refused(where, f"its version is {version!r}, this txl reads 1")
    try:
        return KINDS[kind](content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _refused(where, f"{place}: {first['msg']}") from error
    except ValueError as error:
        raise _refused(where, str(error)) from error


def _refused(where: str, why: str) -> DataError:
    return DataError(
        f"{where} describes no tokenizer that this version knows: {why[:300]}. It was edited, "
        "damaged, or written by a newer txl. Restore it from a copy."
    )
