"""JSON without duplicate keys, its canonical text and the digest of that text.

Apart from `strict.py`, because pydantic would slow down `txl --help`.
"""

import hashlib
import json
from typing import Any

from data_pipeline.errors import printable


def canonical_json(content: object) -> str:
    """The canonical JSON text of `content`: sorted keys, no whitespace, ASCII only."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def sha256_of(content: object) -> str:
    """Hex sha256 of the canonical text."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid text or a duplicate key, RecursionError if deep."""
    return json.loads(text, object_pairs_hook=_reject_duplicates)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads alone would keep the last of two values without an error.
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'key "{printable(duplicate)[:40]}" twice in one object')
    return content


# For many short texts: `parse_json` creates a decoder per call, 33 instead of 13 us for a line.
JSON_DECODER = json.JSONDecoder(object_pairs_hook=_reject_duplicates)
