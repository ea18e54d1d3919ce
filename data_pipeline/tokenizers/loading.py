"""Load `tokenizer.json`, and compare two of them: do they give token ids the same meaning?"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_pipeline.errors import DataError, UnreadableError
from data_pipeline.system.remote_path import DatasetPath, dataset_path
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.strict import first_problem
from data_pipeline.system.strict_json import canonical_json, parse_json
from data_pipeline.tokenizers.byte_char_word import (
    ByteDescription,
    ByteTokenizer,
    CharDescription,
    CharTokenizer,
    WordDescription,
    WordTokenizer,
)
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.interface import Description, Tokenizer

OWN_NAME = "txl_tokenizer.json"
"""The file of this project where tokenizer.json is that of the `tokenizers` library."""


def _own(
    description: type[Description],
    tokenizer: Callable[..., Tokenizer],
    arguments: tuple[str, ...],
    content: dict[str, Any],
) -> Tokenizer:
    """Raises ValueError for content that `Tokenizer.to_json` does not write."""
    fields = description.model_validate(content)
    return tokenizer(**{name: getattr(fields, name) for name in arguments})


def _pretrained(content: dict[str, Any]) -> Tokenizer:
    # Imported here: tokenizers takes 0.1 s to import.
    from data_pipeline.tokenizers.pretrained import PretrainedDescription, PretrainedTokenizer

    return PretrainedTokenizer(PretrainedDescription.model_validate(content))


KINDS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "byte": partial(_own, ByteDescription, ByteTokenizer, ("opens_documents",)),
    "char": partial(_own, CharDescription, CharTokenizer, ("symbols", "opens_documents")),
    "word": partial(_own, WordDescription, WordTokenizer, ("symbols", "lines", "opens_documents")),
    "bpe": _pretrained,
    "file": _pretrained,
    "ids": IdTokenizer.from_description,
}


def load_tokenizer(source: str | DatasetPath | dict[str, Any]) -> Tokenizer:
    """Load the tokenizer from the path or URL of a `tokenizer.json`, or from its parsed content, or
    from the directory of a model of transformers.

    Raises DataError if it is missing, damaged, or of an unknown kind or version.
    """
    if isinstance(source, dict):
        return tokenizer_of(source, source="the tokenizer description")
    path = dataset_path(source)
    if isinstance(path, Path) and path.suffix != ".json" and (found := directory_tokenizer(path)):
        return found
    return tokenizer_of(read_description(path), source=str(path))


def directory_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model of transformers in this directory; None without a tokenizer.json.

    It has as many ids as the model. Documents begin with the token that begins texts there, or if
    none does with the one that ends them, the first `eos_token_id` of config.json. Raises
    DataError.
    """
    from data_pipeline.tokenizers.pretrained import from_library_json, is_library_json

    if (own := directory / OWN_NAME).exists():
        return tokenizer_of(read_description(own), source=str(own))
    path, config_path = directory / "tokenizer.json", directory / "config.json"
    if not path.exists():
        return None
    content = read_description(path)
    if not is_library_json(content):
        return tokenizer_of(content, source=str(path))
    config = _read_options(config_path)
    ends, size = _ends_of_text(config), config.get("vocab_size")
    if not ends or type(ends[0]) is not int or type(size) is not int:
        raise DataError(
            f"{config_path} has eos_token_id={config.get('eos_token_id')!r:.40} and "
            f"vocab_size={size!r:.40}; expected the id of the token that ends a text, and the "
            "number of ids. Add them to the file."
        )
    bos = config.get("bos_token_id")
    if type(bos) is not int or bos == ends[0] or not _begins_texts(bos, directory, content):
        return from_library_json(content, str(path), end=ends[0], vocab_size=size)
    ends += _ends_of_text(_optional(directory / "generation_config.json"))
    ends = [*dict.fromkeys(end for end in ends if type(end) is int and end != bos)]
    return from_library_json(content, str(path), end=bos, ends_of_text=ends, vocab_size=size)


def _ends_of_text(options: dict[str, Any]) -> list[Any]:
    ends = options.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _begins_texts(bos: int, directory: Path, content: dict[str, Any]) -> bool:
    """Whether this id is put before every text: by the template, or in transformers 4 an option."""
    from data_pipeline.tokenizers.pretrained import library_tokenizer

    if _optional(directory / "tokenizer_config.json").get("add_bos_token") is True:
        return True
    with suppress(ValueError):  # `from_library_json` reports what the library cannot read
        return library_tokenizer(canonical_json(content)).encode("").ids[:1] == [bos]
    return False


def _optional(path: Path) -> dict[str, Any]:
    """The options of a file that a model may lack; none if it cannot be used."""
    with suppress(DataError):
        return _read_options(path)
    return {}


def _read_options(path: Path) -> dict[str, Any]:
    """Raises DataError if the file holds no JSON object."""
    options = read_description(path)
    if not isinstance(options, dict):
        raise DataError(f"{path} must hold a JSON object. Download the model again.")
    return options


def read_description(path: DatasetPath) -> Any:
    """Parse the JSON of a tokenizer file without validating it. Raises DataError."""
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        problem = f"{path}: the tokenizer cannot be read ({error.strerror})."
        if is_read_failure(error):
            advice = "Check the disk or network and run this again."
            raise UnreadableError(f"{problem} {advice}") from error
        raise DataError(
            f"{problem} A dataset and a downloaded model have one; create or download it again."
        ) from error
    except (ValueError, RecursionError) as error:
        if str(path).endswith((".tiktoken", ".model")):
            raise DataError(
                f"{path}: files of tiktoken and SentencePiece are not read. Give the "
                "tokenizer.json of the same tokenizer, which transformers writes: "
                "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)."
            ) from error
        raise DataError(
            f"{path} is not valid JSON ({error}). It was edited or damaged; create the dataset "
            "again: txl prepare INPUT --out DIR."
        ) from error


def tokenizer_of(content: object, *, source: str) -> Tokenizer:
    """The tokenizer of parsed JSON. `source` names it in errors. Raises DataError."""
    fields = content if isinstance(content, dict) else {}
    kind, version = str(fields.get("type")), fields.get("version")
    try:
        if kind not in KINDS or type(version) is not int or version != 1:
            raise ValueError(
                f"its type is {kind!r}, version {version!r}; supported are {', '.join(KINDS)}, "
                "version 1"
            )
        return KINDS[kind](fields)
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{source} is not a tokenizer that this version can read: {reason[:300]}. It was "
            "edited, damaged, or written by a newer txl. Restore it from a copy."
        ) from error


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
    """As `differences`, for two tokenizers that are not equal."""
    facts = {
        "type": [each.description.model_dump()["type"] for each in (first, other)],
        "vocab_size": [first.vocab_size, other.vocab_size],
        "end_of_document": [first.end_of_document, other.end_of_document],
    }
    parts = [f"{name} {one} and {two}" for name, (one, two) in facts.items() if one != two]
    return ", ".join(parts) or "the text of some ids, or another setting"
