"""Whether two stored tokenizers give token ids the same meaning, and what differs if they do not.

A dataset or checkpoint has a `tokenizer.json`, and its digest in the manifest. Names of ids are no
part of the digest, but until version 0.9 they were: such a digest is accepted with its names.
"""

import hashlib
import json
from dataclasses import dataclass

from data_pipeline.errors import DataError, printable
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.tokenizers.interface import Tokenizer
from data_pipeline.tokenizers.loading import load_tokenizer


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """A `tokenizer.json` and the digest that the manifest next to it has."""

    path: DatasetPath
    digest: str

    def load(self) -> Tokenizer | None:
        """None if the file cannot be read, or is another one than the manifest says."""
        try:
            tokenizer = load_tokenizer(self.path)
        except DataError:
            return None
        return tokenizer if has_digest(tokenizer, self.digest) else None


def has_digest(tokenizer: Tokenizer, digest: str) -> bool:
    """Whether `digest` identifies the tokenizer, also as it was computed until version 0.9."""
    return digest in (tokenizer.digest, hashlib.sha256(tokenizer.to_json().encode()).hexdigest())


def differences(first: StoredTokenizer, other: StoredTokenizer) -> str:
    """What differs, such as "vocab_size 131 and 132"; "" if ids have the same meaning in both."""
    if first.digest == other.digest:
        return ""
    loaded, other_loaded = first.load(), other.load()
    if loaded is None or other_loaded is None:
        return f"digest {first.digest} and {other.digest}"
    if loaded.digest == other_loaded.digest:
        return ""
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
