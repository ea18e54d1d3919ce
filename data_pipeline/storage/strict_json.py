"""JSON as this project reads and writes it: no key twice, one canonical text, one digest."""

import hashlib
import json
from typing import Any


def canonical(content: object) -> str:
    """The one text of `content`: sorted keys, no blanks, ASCII only."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def sha256_of(content: object) -> str:
    """Hex sha256 of the canonical text."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def parse(text: str | bytes) -> Any:
    """The content of JSON. Raises ValueError for none, for a key twice, RecursionError if deep."""
    return json.loads(text, object_pairs_hook=_no_duplicates)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found
