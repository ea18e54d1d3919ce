"""Cutting a text that is too long to hold into pieces whose tokens, joined, are the whole's.

Where that is possible depends on the tokenizer, which says so in `cuts`:

- `anywhere`: after `max_chars` characters.
- `space`: between a character that is no whitespace and a blank, tab or line break, which opens
  the next piece. No token of words, or of byte-level BPE after GPT-2's pattern, spans this place,
  and no decision before it looks beyond it.
- `line`: behind a line break.
- `never`: the whole text is one piece.

The last such place within `max_chars` is taken. Where there is none the text is cut at `max_chars`
all the same: its tokens may then differ from the whole's, which is part of the encoding.
"""

from collections.abc import Iterable, Iterator

from data_pipeline.tokenizers.interface import Cuts

# ASCII only: what else counts as whitespace differs between Python and the patterns of BPE.
_BLANKS = frozenset(" \t\n\r")


def text_parts(pieces: Iterable[str], *, max_chars: int, cuts: Cuts = "space") -> Iterator[str]:
    """Non-empty pieces of at most `max_chars` characters (`never`: one of any length).

    They depend on the joined text alone, not on how it came in `pieces`. Holds the longer of
    `max_chars` and one of the given pieces, twice. Raises ValueError for `max_chars` below 1.
    """
    if max_chars < 1:
        raise ValueError(f"max_chars={max_chars} must be at least 1")
    held: list[str] = []
    num_held = 0
    for piece in pieces:
        held.append(piece)
        num_held += len(piece)
        if num_held > max_chars and cuts != "never":
            text, start = "".join(held), 0
            while len(text) - start > max_chars:
                stop = _cut(text, start, start + max_chars, cuts)
                yield text[start:stop]
                start = stop
            held, num_held = [text[start:]], len(text) - start
    if num_held:
        yield "".join(held)


def _cut(text: str, start: int, limit: int, cuts: Cuts) -> int:
    """The last place in (start, limit] where `text` may be cut; `limit` if there is none."""
    if cuts == "line":
        return text.rfind("\n", start, limit) + 1 or limit
    if cuts == "space":
        for place in range(limit, start, -1):
            if text[place] in _BLANKS and not text[place - 1].isspace():
                return place
    return limit
