"""Pieces: a split cut so that workers can score it apart and get the number of one pass.

The receptive field of a token is finite: each layer reaches `mem_len` back from its segment's
start. So n_layer * ceil(mem_len / tgt_len) whole segments of unscored warm-up, cut on the same
segment grid as the sequential pass, give exactly the memory of that pass. Under `reset: document`
no token sees past its document, so warm-up need not go past the segment in which it starts.

Pure integers. The cut depends on the split and the model alone, never on workers or batch size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["exact", "fast"]

LONGEST_IN_WARM_UPS = 8
"""A piece is at most this many times as long as its warm-up, which then costs an eighth more."""
SHORTEST_IN_WARM_UPS = 2
"""And at least this many times, so that at most half as much again is read."""
NUM_PIECES_WANTED = 16
"""Between the two, a split is cut into about this many pieces, to be shared out."""
LONGEST_WITHOUT_WARM_UP = 64
"""Segments of a piece where warm-up sets no limit."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Input positions [start, stop) of a split are scored after reading [warm_start, start)."""

    warm_start: int
    start: int
    stop: int


def plan_pieces(
    *,
    num_targets: int,
    tgt_len: int,
    mem_len: int,
    n_layer: int,
    mode: Mode,
    document_start: Callable[[int], int] | None = None,
) -> list[Piece]:
    """Pieces that score the targets of input positions [0, num_targets) exactly once.

    `document_start(position)`, given under `reset: document`, is where the document of that input
    position starts. `fast` warms up for one memory length only, and is not exact.
    """
    if num_targets < 1:
        raise ValueError(f"num_targets={num_targets}: a split needs two tokens to have a target")
    memory_segments = -(-mem_len // tgt_len)
    warm_segments = memory_segments * (n_layer if mode == "exact" else 1)
    num_segments = -(-num_targets // tgt_len)
    piece_segments = _piece_segments(num_segments, warm_segments)
    pieces = []
    for first in range(0, num_segments, piece_segments):
        start = first * tgt_len
        warm_start = max(0, first - warm_segments) * tgt_len
        if document_start is not None and warm_start < start:
            warm_start = max(warm_start, document_start(start) // tgt_len * tgt_len)
        stop = min(num_targets, start + piece_segments * tgt_len)
        pieces.append(Piece(warm_start, start, stop))
    return pieces


def _piece_segments(num_segments: int, warm_segments: int) -> int:
    """Segments a piece: enough pieces to share out, few enough to keep the overhead low."""
    shortest = max(1, SHORTEST_IN_WARM_UPS * warm_segments)
    longest = max(LONGEST_WITHOUT_WARM_UP, LONGEST_IN_WARM_UPS * warm_segments)
    return min(max(-(-num_segments // NUM_PIECES_WANTED), shortest), longest)


def overhead(pieces: list[Piece]) -> float:
    """Tokens read for warm-up, as a share of the tokens scored."""
    warm = sum(piece.start - piece.warm_start for piece in pieces)
    return warm / sum(piece.stop - piece.start for piece in pieces)
