"""Cut a long text into parts, so that the parts' tokens, joined, are the tokens of the text.

The tokenizer's `cuts` says where that is possible:

- `anywhere`: after any `max_chars` characters.
- `space`: before a space, tab or line break that follows a character other than whitespace. No
  word, and no token of byte-level BPE with GPT-2's pattern, crosses this position, and the
  tokenization before it does not depend on the text after it.
- `line`: after a line break.
- `never`: the whole text is one part.

A part ends at the last such position within `max_chars`. If there is none, it ends at `max_chars`;
the tokens can then differ from those of the whole text. This is part of the encoding.
"""

import re
from collections.abc import Iterable, Iterator

from data_pipeline.tokenizers.interface import Cuts

# tiktoken fails on a million spaces in a row, so this must be smaller. It decides the tokens of
# texts that have no position to cut at: changing it changes datasets.
MAX_PART_CHARS = 2**19
# ASCII only: Python and the patterns of BPE disagree on other whitespace.
_BLANK_AFTER_WORD = re.compile(r"(?<=\S)[ \t\n\r]")
_SEARCH_CHARS = 256


def text_parts(fragments: Iterable[str], *, max_chars: int, cuts: Cuts = "space") -> Iterator[str]:
    """Yield non-empty parts of at most `max_chars` characters (`never`: one of any length).

    The parts depend on the joined text alone, not on how it is divided into `fragments`. Holds at
    most twice `max_chars`, or twice the longest fragment.
    """
    if max_chars < 1:
        raise ValueError(f"max_chars={max_chars} must be at least 1")
    buffer: list[str] = []
    num_chars = 0
    for fragment in fragments:
        buffer.append(fragment)
        num_chars += len(fragment)
        if num_chars > max_chars and cuts != "never":
            text, start = "".join(buffer), 0
            while len(text) - start > max_chars:
                stop = _cut(text, start, start + max_chars, cuts)
                yield text[start:stop]
                start = stop
            buffer, num_chars = [text[start:]], len(text) - start
    if num_chars:
        yield "".join(buffer)


def _cut(text: str, start: int, limit: int, cuts: Cuts) -> int:
    """The last position in (start, limit] where `text` may be cut; `limit` if there is none."""
    if cuts == "line":
        return text.rfind("\n", start, limit) + 1 or limit
    if cuts == "space":
        # Backwards in growing windows: the last position is usually near the limit.
        stop, num_chars = limit + 1, _SEARCH_CHARS
        while stop > start + 1:
            first = max(stop - num_chars, start + 1)
            matches = [match.start() for match in _BLANK_AFTER_WORD.finditer(text, first, stop)]
            if matches:
                return matches[-1]
            stop, num_chars = first, 2 * num_chars
    return limit
