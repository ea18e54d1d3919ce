"""Counts the tokens that a resume would lose or read twice. Pure integers.

The count does not rely on how `phases.py` continues a run: it compares what all phases before the
resume have read of the current epoch with what the phase after it is going to read.
"""

from dataclasses import dataclass

from data_pipeline.streams.remainder import merged, num_tokens
from txl_dist.training.state import Phase, TrainState


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of the epoch in which a run resumes."""

    epoch: int
    read: int
    unread: int
    """Tokens that the run is going to read in this epoch, with the tail that no lane gets."""
    lost: int
    """Neither read nor going to be read, if they are enough for one token per lane."""
    twice: int
    """Read already and going to be read again."""
    targets_missing: int
    """Targets up to the resume, less those that were trained on; 0 if no step was skipped."""

    @property
    def line(self) -> str:
        """`tokens lost by this resume 0, read twice 0 | epoch 3: 1,000 tokens read, 500 unread`."""
        trained = f" | targets not trained on {self.targets_missing:,}"
        return (
            f"tokens lost by this resume {self.lost:,}, read twice {self.twice:,}"
            f" | epoch {self.epoch}: {self.read:,} tokens read, {self.unread:,} unread"
            f"{trained if self.targets_missing else ''}"
        )


def count_tokens(before: tuple[Phase, ...], state: TrainState) -> TokenCount:
    """Compare the phases of a checkpoint with the last phase of `state`, which continues it."""
    after = state.phases[-1]
    plans = [phase.plan() for phase in before]
    stops = [*(phase.position for phase in before[1:]), state.position]
    progress = [plan.progress(stop) for plan, stop in zip(plans, stops, strict=True)]
    epoch = progress[-1].epoch
    read = [part for past in progress if past.epoch == epoch for part in past.read]
    next_epoch, _, unread = after.plan().progress(state.position)
    unread = unread if next_epoch == epoch else ()
    covered = num_tokens(merged([*read, *unread]))
    missing = before[-1].num_tokens - covered
    targets = sum(
        plan.targets_between(plan.start, stop) for plan, stop in zip(plans, stops, strict=True)
    )
    return TokenCount(
        epoch=epoch,
        read=num_tokens(read),
        unread=num_tokens(unread),
        lost=missing if missing >= (after.num_lanes or 0) else 0,
        twice=num_tokens(read) + num_tokens(unread) - covered,
        targets_missing=targets - state.tokens,
    )
