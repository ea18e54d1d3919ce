"""Lanes: which tokens each data-parallel rank reads, and in what order.

A lane is one contiguous stream of tokens and one row of the global batch. (If steps read the lanes
in turns, "step" means a round of turns here; `segments.py` has the turns.) In every lane, the
segment of step s + 1 starts at the token after the segment of step s, so the model's memory holds
the layer inputs of the tokens directly before the segment, except at the start of a slice. With N
tokens per epoch and L lanes (elsewhere L counts layers), each lane reads one slice of Q = N // L
tokens of the epoch order:

    epoch order     |------- lane 0 -------|------- lane 1 -------|------- lane 2 -------|..|
                    0                      Q                      2Q                     3Q  N

All lanes have the same length. Every rank therefore makes the same number of steps, nothing is
padded, and a document longer than a slice needs no special case. The cost: the last N mod L tokens
of an epoch order, fewer than L, are not read in that epoch.

All lanes advance together, so one integer, the lane position p, is the complete reading state. It
grows without end. With p counted from the start of the phase, p is offset p % Q of the slice in the
phase's epoch p // Q (`epoch_ranges` subtracts `start` and adds `first_epoch`), and every epoch cuts
a new order in the same way:

    lane position   0 ........... Q - 1 | Q .......... 2Q - 1 | 2Q ...
    lane 1 reads    epoch 0, Q .. 2Q - 1 | epoch 1, Q .. 2Q - 1 | epoch 2 ...

The token after a slice's end belongs to unrelated text. That one target is masked, and the age of
the tokens starts again from zero (`segments.py`).

The number of lanes may change inside an epoch. The ranges of the order that are still unread, with
the tail, are then joined, and the new lanes are cut from them. Where a lane crosses from one range
to the next, it is as at the end of a slice. Two lanes at offset o, continued by three:

    epoch order     |..o-----------------|..o-----------------|-|       .. read by the two lanes
    new lanes          |lane 0 ----|lane 1 --  -|lane 2 ------|

Each rank reads whole lanes (`lanes_of_rank`). The content of a lane does not depend on the number
of ranks, so a run can stop on 8 ranks and resume, with its memory, on 3.

This module is pure integer arithmetic. `order.py` defines the order of an epoch; `segments.py`
reads the tokens.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2. The cut into equal
slices is `batchify` of the paper's code, here applied to every epoch and to any order.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from data_pipeline.errors import ConfigError, DataError, counted
from data_pipeline.streams.order import Range, Remainder, merged


class EpochRange(NamedTuple):
    """Consecutive lane positions in one epoch: offsets [start, stop) of every lane's slice."""

    epoch: int
    start: int
    stop: int


class TokenRange(NamedTuple):
    """Tokens [start, stop) of an epoch's order, which a lane reads at consecutive positions."""

    start: int
    stop: int
    age: int
    """Tokens directly before `start` that the lane has read or replayed (`Remainder`)."""


class EpochProgress(NamedTuple):
    """What a plan has read of an epoch at some position, and what is unread."""

    epoch: int
    read: tuple[Range, ...]
    unread: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class LanePlan:
    """Assigns the tokens of every epoch to lanes, lanes to ranks, and lane positions to steps.

    Raises DataError if a slice has fewer than two tokens: it would have no target.
    """

    num_tokens: int
    """N, tokens per epoch."""
    num_lanes: int
    """L, rows of the global batch."""
    tgt_len: int
    """Tokens per lane and step."""
    start: int = 0
    """First lane position of the plan. Positions before it belong to the plan of another phase."""
    first_epoch: int = 0
    """Number of the epoch that begins at `start`."""
    remainder: Remainder | None = None
    """The part of `first_epoch` that earlier phases have left; None: all of it."""
    num_turns: int = 1
    """Steps in which every lane is read once: each step reads every `num_turns`-th lane."""

    def __post_init__(self) -> None:
        if self.num_lanes < 1 or self.tgt_len < 1:
            raise ValueError(
                f"num_lanes={self.num_lanes} and tgt_len={self.tgt_len} must be at least 1"
            )
        if self.num_tokens < 2:
            raise DataError(
                f"Too little data: the split holds {self.num_tokens} tokens, and a lane needs at "
                "least 2. Prepare more text with txl prepare."
            )
        if self.lane_tokens < 2:
            raise DataError(
                f"Too little data: the split holds {self.num_tokens:,} tokens, num_lanes="
                f"{self.num_lanes} needs at least {2 * self.num_lanes:,} (2 per lane). Lower "
                f"data.num_lanes to {self.num_tokens // 2} or less, or prepare more text with "
                "txl prepare."
            )
        if self.lane_tokens_in(self.first_epoch) < 1:
            raise ValueError(f"{self.remainder} has no token for each of {self.num_lanes} lanes")

    # --- who reads what -------------------------------------------------------------------------

    @property
    def lane_tokens(self) -> int:
        """Q = N // L, the tokens of one lane in one whole epoch."""
        return self.num_tokens // self.num_lanes

    def lane_tokens_in(self, epoch: int) -> int:
        return self._remainder_of(epoch).num_tokens // self.num_lanes

    def token_ranges(self, lane: int, part: EpochRange) -> list[TokenRange]:
        """What a lane reads at these positions, from left to right: usually one range.

        Between two ranges the text breaks off: the last token of the first one has no target.
        Positions before the plan's start have the tokens to replay; where there are none, the
        ranges have fewer tokens than `part`.
        """
        remainder = self._remainder_of(part.epoch)
        lane_tokens = remainder.num_tokens // self.num_lanes
        (first, end), *others = remainder.ranges_of(lane * lane_tokens, (lane + 1) * lane_tokens)
        # The tokens to replay extend the lane's first range to the left, to negative offsets.
        offset = -min(remainder.context_tokens, first)
        token_ranges = []
        for start, stop in [(first + offset, end), *others]:
            low, high = max(part.start, offset), min(part.stop, offset + stop - start)
            if low < high:
                age = low - offset
                token_ranges.append(TokenRange(start + age, start + high - offset, age))
            offset += stop - start
        return token_ranges

    def progress(self, position: int) -> EpochProgress:
        """What this plan has read of the epoch at `position`, and what is unread, with the tail."""
        epoch, offset = self._locate(position)
        remainder, lane_tokens = self._remainder_of(epoch), self.lane_tokens_in(epoch)
        read, unread = [], []
        for slice_start in range(0, self.num_lanes * lane_tokens, lane_tokens):
            read += remainder.ranges_of(slice_start, slice_start + offset)
            unread += remainder.ranges_of(slice_start + offset, slice_start + lane_tokens)
        unread += remainder.ranges_of(self.num_lanes * lane_tokens, remainder.num_tokens)
        return EpochProgress(epoch, merged(read), merged(unread))

    def _remainder_of(self, epoch: int) -> Remainder:
        whole = Remainder(((0, self.num_tokens),))
        return self.remainder if self.remainder and epoch == self.first_epoch else whole

    def lanes_of_rank(self, rank: int, num_ranks: int) -> range:
        """The lanes that one of W ranks reads: [floor(rL / W), floor((r + 1)L / W)).

        Every lane has exactly one rank, and the numbers of lanes of two ranks differ by at most 1:
        with 5 lanes on 2 ranks, rank 0 reads lanes 0 and 1, rank 1 lanes 2, 3 and 4.
        Raises ConfigError for more ranks than lanes.
        """
        if num_ranks > self.num_lanes:
            raise ConfigError(
                f"{num_ranks} ranks for data.num_lanes={self.num_lanes}: every rank needs a lane. "
                f"Start at most {counted(self.num_lanes, 'rank')}, or set data.num_lanes to "
                f"{num_ranks} or more (lanes are the global batch: a run that has begun also needs "
                "--allow-change data.num_lanes)."
            )
        # Consecutive lanes: the ranks' rows, one after the other, are the lanes in order.
        return range(
            rank * self.num_lanes // num_ranks,
            (rank + 1) * self.num_lanes // num_ranks,
        )

    def rows_per_rank(self, num_ranks: int) -> int:
        """Rows of every rank's batch: ceil(L / W), divided by the number of turns, rounded up.

        A rank with one lane fewer masks its last row, so that all ranks compute the same number of
        micro-batches of the same shape. Raises ConfigError for more ranks than lanes.
        """
        most_lanes = len(self.lanes_of_rank(num_ranks - 1, num_ranks))  # the last rank's
        return math.ceil(most_lanes / self.num_turns)

    # --- in which step --------------------------------------------------------------------------

    def epoch_ranges(self, start: int, stop: int) -> list[EpochRange]:
        """Lane positions [start, stop), split where epochs end. A step at p reads [p, p + tgt_len).

        With Q = 10, `plan.epoch_ranges(8, 25)` is epoch 0 [8, 10), epoch 1 [0, 10), epoch 2 [0, 5).
        Positions before the plan's start have negative offsets in its first epoch.
        """
        epoch_ranges = []
        while start < stop:
            epoch, offset = self._locate(start)
            num_tokens = min(self.lane_tokens_in(epoch) - offset, stop - start)
            epoch_ranges.append(EpochRange(epoch, offset, offset + num_tokens))
            start += num_tokens
        return epoch_ranges

    def slice_ends(self, start: int, stop: int) -> range:
        """Lane positions in [start, stop) of the last token of a slice: these have no target."""
        first_end = self.start + self.lane_tokens_in(self.first_epoch) - 1
        num_before = max(0, -(-(start - first_end) // self.lane_tokens))  # rounded up
        return range(first_end + num_before * self.lane_tokens, stop, self.lane_tokens)

    def lanes_of_turn(self, turn: int) -> range:
        """The lanes that a step reads: every `num_turns`-th one.

        Every rank with at least `num_turns` lanes, which are consecutive, has one in each turn.
        """
        return range(turn, self.num_lanes, self.num_turns)

    def lanes_in_turns(self, lanes: Iterable[int]) -> list[list[int]]:
        """These lanes by the turn in which they are read."""
        turns = range(self.num_turns)
        return [[lane for lane in lanes if lane in self.lanes_of_turn(turn)] for turn in turns]

    def targets_in_step(self, position: int, turn: int = 0) -> int:
        """Unmasked targets of the step at `position`, over its lanes of all ranks."""
        stop, lanes = position + self.tgt_len, self.lanes_of_turn(turn)
        num_positions = self.tgt_len - len(self.slice_ends(position, stop))
        first_gap, end = (bisect_left(self._gaps, (p - self.start,)) for p in (position, stop))
        gaps = sum(lane in lanes for _, lane in self._gaps[first_gap:end])
        return len(lanes) * num_positions - gaps

    def _locate(self, position: int) -> tuple[int, int]:
        """The epoch at a lane position, and the offset in every lane's slice."""
        # Positions count on through phases; epochs of this plan start at `self.start`.
        offset = position - self.start - self.lane_tokens_in(self.first_epoch)
        if offset < 0:
            return self.first_epoch, position - self.start
        epoch, offset = divmod(offset, self.lane_tokens)
        return self.first_epoch + 1 + epoch, offset

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """(offset in the first epoch, lane), ascending, where a lane's text breaks off."""
        lane_tokens = self.lane_tokens_in(self.first_epoch)
        starts = self._remainder_of(self.first_epoch).starts[1:-1]
        last_tokens = (divmod(start - 1, lane_tokens) for start in starts)
        return sorted(
            (offset, lane)
            for lane, offset in last_tokens
            if lane < self.num_lanes and offset < lane_tokens - 1
        )
