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
        died = tuple(rank for rank, error in worker_exceptions.items() if _is_death(error))
        LaunchFiles(self._run, self._launch_id).append_failure(worker_exceptions, died=died)


def _is_death(error: BaseException) -> bool:
    """Whether the worker's process ended. Ray Train wraps Ray's error in others."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RayActorError):
            return True
        cause = getattr(cause, "health_check_failure", None) or cause.__cause__
    return False
