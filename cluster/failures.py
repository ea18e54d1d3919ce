"""FailureRecorder: Ray Train's controller tells the launcher which ranks failed, and how."""

from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from ray.train import UserCallback

from cluster.attempt import AttemptFiles


class FailureRecorder(UserCallback):
    """Called by Ray Train in its controller, on the launcher's node."""

    def __init__(self, run: Path, attempt: str) -> None:
        self._run, self._attempt = run, attempt

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Leave it in a file: the launcher's calls into Ray return when all is over."""
        died = tuple(rank for rank, error in worker_exceptions.items() if _is_death(error))
        AttemptFiles(self._run, self._attempt).append_failure(worker_exceptions, died=died)


def _is_death(error: BaseException) -> bool:
    """Whether the worker's process is gone; Ray Train wraps what Ray says about it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RayActorError):
            return True
        cause = getattr(cause, "health_check_failure", None) or cause.__cause__
    return False
