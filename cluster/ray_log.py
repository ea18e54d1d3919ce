"""RUN/logs/ray.log: the output of Ray, which can fill pages of the terminal when a node dies."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger("ray.txl")


@contextmanager
def ray_log(path: Path | None) -> Iterator[None]:
    """While connected to Ray: write Ray's log and its workers' output to `path` only.

    None: write it nowhere. Ray's own files are in its session directory.
    """
    from ray._private import worker

    def write(data: dict[str, Any], *_: object, **__: object) -> None:
        for line in data["lines"]:
            log.warning("%s: %s", data.get("pid", "ray"), line)

    handler = logging.NullHandler() if path is None else logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger("ray")
    previous = logger.handlers[:], logger.level, logger.propagate, worker.print_worker_logs
    logger.handlers, logger.propagate, worker.print_worker_logs = [handler], False, write
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.level, logger.propagate, worker.print_worker_logs = previous
        handler.close()
