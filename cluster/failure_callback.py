"""FailureCallback: Ray Train's controller calls it when ranks fail; it informs the launcher."""

from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from ray.train import UserCallback

from txl_dist.launch.launch_files import LaunchFiles


class FailureCallback(UserCallback):
    """Runs in Ray Train's controller, on the launcher's node."""

    def __init__(self, run: Path, launch_id: str) -> None:
        self._run, self._launch_id = run, launch_id

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Record the failure in a file, because the launcher's call into Ray still blocks."""
        deaths = {rank: _death(error) for rank, error in worker_exceptions.items()}
        LaunchFiles(self._run, self._launch_id).append_failure(
            worker_exceptions,
            died=tuple(rank for rank, death in deaths.items() if death is not None),
            is_preemption=any(death is not None and death.preempted for death in deaths.values()),
        )


def _death(error: BaseException) -> RayActorError | None:
    """The error of Ray about the worker's process, if it ended. Ray Train wraps it in others."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RayActorError):
            return cause
        cause = getattr(cause, "health_check_failure", None) or cause.__cause__
    return None
