"""Lanes: which tokens each data-parallel rank reads, and in what order.

A lane is one unbroken run of tokens, and one row of the global batch. The segment of step s + 1
starts in every lane at the token where the segment of step s stopped; the model's memory means
something only because of that. With N tokens an epoch and L lanes, each lane owns a slice of
Q = N // L tokens of the epoch's order:

    epoch's order   |------- lane 0 -------|------- lane 1 -------|------- lane 2 -------|..|
                    0                      Q                      2Q                     3Q  N

An exact cut: every lane is as long as the others, so every rank makes the same number of steps,
nothing is padded, and a document larger than a slice needs no special case. The last N mod L tokens
of an epoch's order stay unread in that epoch. All lanes move together, so one integer, the lane
position p, is the whole reading state. It never ends: p is offset p % Q of the slice in epoch
p // Q, and the next epoch cuts a new order the same way:

    lane position   0 ........... Q - 1 | Q .......... 2Q - 1 | 2Q ...
    lane 1 reads    epoch 0, Q .. 2Q - 1 | epoch 1, Q .. 2Q - 1 | epoch 2 ...

The token after a slice's end is the start of another run of text: to predict it would be noise, so
that one target is masked, and the age of the tokens counts from zero again (`segments.py`).

Ranks come last, and own whole lanes. What a lane reads never depends on how many ranks there are;
that is why a run can stop on 8 ranks and go on, with its memory, on 3.

Pure integers. The order of an epoch is `order.py`; reading is `cursor.py` and `segments.py`.

Source: segment-level recurrence, Dai et al. 2019, arXiv:1901.02860, section 3.2. The cut into
equal slices is the batchify of the paper's code, here per epoch and over any order.
"""

from dataclasses import dataclass
from typing import NamedTuple

from data_pipeline.errors import ConfigError, DataError


class Span(NamedTuple):
    """Neighbouring lane positions inside one epoch: offsets [start, stop) of every lane's slice."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePlan:
    """Who reads what: an epoch of `num_tokens` tokens in `num_lanes` lanes, `tgt_len` at a step.

    Every lane's age begins anew at `start`. `num_lanes` and `tgt_len` are checked by the config.
    Raises DataError if a slice would have fewer than two tokens, for then there is nothing to
    predict in it.
    """

    num_tokens: int
    num_lanes: int
    tgt_len: int
    start: int = 0
    """Lane position of the plan's first token; before it another plan was followed."""
    first_epoch: int = 0
    """Number of the epoch that begins at `start`."""

    def __post_init__(self) -> None:
        if self.num_lanes < 1 or self.tgt_len < 1:
            raise ValueError(
                f"num_lanes={self.num_lanes} and tgt_len={self.tgt_len} must be at least 1"
            )
        if self.lane_tokens < 2:
            raise DataError(
                f"Too little data: the split holds {self.num_tokens:,} tokens, num_lanes="
                f"{self.num_lanes} needs at least {2 * self.num_lanes:,} (2 a lane). Lower "
                f"data.num_lanes to {self.num_tokens // 2} or less, or prepare more text with "
                "txl prepare."
                if self.num_tokens >= 2
                else f"Too little data: the split holds {self.num_tokens} tokens, and a lane needs "
                "at least 2. Prepare more text with txl prepare."
            )

    @property
    def lane_tokens(self) -> int:
        """Q, the tokens of one lane's slice of an epoch."""
        return self.num_tokens // self.num_lanes

    def slice_start(self, lane: int) -> int:
        """Where a lane's slice begins in the order of every epoch."""
        return lane * self.lane_tokens

    # --- time: what a step reads ----------------------------------------------------------------

    def spans(self, start: int, stop: int) -> list[Span]:
        """Lane positions [start, stop), cut where epochs end. The segment at p is [p, p + tgt_len).

        `plan.spans(8, 25)` with Q = 10 is epoch 0 [8, 10), epoch 1 [0, 10), epoch 2 [0, 5).
        """
        spans = []
        while start < stop:
            epoch, offset = divmod(start - self.start, self.lane_tokens)
            num_tokens = min(self.lane_tokens - offset, stop - start)
            spans.append(Span(self.first_epoch + epoch, offset, offset + num_tokens))
            start += num_tokens
        return spans

    def slice_ends(self, start: int, stop: int) -> range:
        """The lane positions in [start, stop) that are the last of a slice: no target there."""
        return range(start + (self.start - start - 1) % self.lane_tokens, stop, self.lane_tokens)

    def targets_in_step(self, position: int) -> int:
        """Unmasked targets of the segment at `position`, over all lanes of all ranks.

        Known before the first micro-batch, so that a loss sum can be divided once, by the same
        number on every rank.
        """
        num_ends = len(self.slice_ends(position, position + self.tgt_len))
        return self.num_lanes * (self.tgt_len - num_ends)

    # --- space: who reads it --------------------------------------------------------------------

    def lanes_of_rank(self, rank: int, num_ranks: int) -> range:
        """The lanes of one rank, [floor(rL/W), floor((r+1)L/W)): a partition, as even as can be.

        Raises ConfigError if a rank would have no lane.
        """
        self._check_ranks(num_ranks)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank={rank} is not one of num_ranks={num_ranks}")
        return range(
            rank * self.num_lanes // num_ranks,
            (rank + 1) * self.num_lanes // num_ranks,
        )

    def rows_per_rank(self, num_ranks: int) -> int:
        """Rows of every rank's batch, ceil(L/W), the same on all ranks.

        A rank with one lane fewer masks the last row, so that all ranks make the same number of
        micro-batches of the same shape. Raises ConfigError if a rank would have no lane.
        """
        self._check_ranks(num_ranks)
        return -(-self.num_lanes // num_ranks)

    def _check_ranks(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks} must be at least 1")
        if num_ranks > self.num_lanes:
            raise ConfigError(
                f"{num_ranks} ranks for data.num_lanes={self.num_lanes}: every rank needs a lane. "
                f"Start at most {self.num_lanes} ranks, or set data.num_lanes to {num_ranks} or "
                "more in a new run (lanes are the global batch, so a run cannot change them)."
            )
