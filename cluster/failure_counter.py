"""FailureCounter: which failures of ranks under Ray count, and when there were too many.

Ray Train counts every failure of a run and cannot tell a crash from a lost node in time. So the
supervisor restarts the ranks, and ends the launch once its budget is exhausted.
"""

import time
from dataclasses import dataclass, field

from txl_dist.checkpoint.directory import resume_advice
from txl_dist.errors import TxlError
from txl_dist.launch.supervision import RestartBudget, restart_delay_seconds
from txl_dist.training.run_directory import RunDirectory

NODE_LOSS_SECONDS = 6.0
"""Time for Ray to find out, after ranks have failed, that their node has died."""
MAX_NODE_LOSSES = 10
"""Nodes that may be lost between two checkpoints. More are no coincidence: the run may end them."""


@dataclass(frozen=True)
class _Uncounted:
    event: str
    node_ids: frozenset[str]
    newest_step: int | None
    seen_at: float = field(default_factory=time.monotonic)


class FailureCounter:
    """Counts failures since the newest checkpoint grew; of lost nodes it allows MAX_NODE_LOSSES.

    `wait_seconds`: how long a failure stays undecided, because a node may have died.
    """

    def __init__(
        self,
        budget: RestartBudget,
        directory: RunDirectory,
        *,
        wait_seconds: float = NODE_LOSS_SECONDS,
    ) -> None:
        self._budget, self._directory, self._wait_seconds = budget, directory, wait_seconds
        self._uncounted: list[_Uncounted] = []
        self._num_losses, self._newest_step = 0, -1

    def add(self, event: str, *, node_ids: frozenset[str]) -> None:
        """A failure of ranks that ran on these nodes; `event` says what failed."""
        newest_step = self._directory.checkpoints.newest_step()
        self._budget.begin_at(newest_step)
        self._begin_losses_at(newest_step)
        self._uncounted.append(_Uncounted(event, node_ids, newest_step))

    @property
    def delay_seconds(self) -> float:
        """How long to wait before the next start."""
        return restart_delay_seconds(
            self._budget.num_failures + self._num_losses + len(self._uncounted)
        )

    def check(self, live_node_ids: frozenset[str] | None) -> TxlError | None:
        """Decide what can be decided; returns the error that ends the launch.

        `live_node_ids` are the nodes that Ray knows to be alive; None if that is not known yet.
        """
        now = time.monotonic()
        undecided = []
        for failure in self._uncounted:
            if live_node_ids is not None and not failure.node_ids <= live_node_ids:
                if self._is_loss_too_many():
                    return TxlError(
                        f"{failure.event}, with its node; {self._num_losses} nodes were lost since "
                        "the last checkpoint, so the run may be what ends them (memory: see dmesg "
                        f"there). {resume_advice(self._directory.path)}"
                    )
                continue
            if now - failure.seen_at < self._wait_seconds:
                undecided.append(failure)
            elif not self._budget.allows_restart(newest_step=failure.newest_step):
                return self._budget.exhausted_error(failure.event, self._directory)
        self._uncounted = undecided
        return None

    def _begin_losses_at(self, newest_step: int | None) -> None:
        if newest_step is not None and newest_step > self._newest_step:
            self._num_losses, self._newest_step = 0, newest_step

    def _is_loss_too_many(self) -> bool:
        self._num_losses += 1
        return self._num_losses > MAX_NODE_LOSSES
