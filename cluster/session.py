"""A connection to Ray: one of our own on this machine, or to a running cluster.

Our own listens on 127.0.0.1 only and asks for a token that nobody else has. Ray's variables must be
set before Ray is imported, which is why this module imports it late.
"""

import atexit
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from txl_dist.errors import ConfigError, TxlError


@contextmanager
def ray_session(address: str | None, *, num_cpus: int) -> Iterator[None]:
    """Connect for the length of the context. `num_cpus` sizes a Ray of our own."""
    # Deduplication cuts tracebacks in the middle.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_own_token())
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address is None:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=True,  # without it Ray floods the log with complaints
                dashboard_host="127.0.0.1",
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "a local Ray" if address is None else f"the Ray cluster at {address}"
        raise TxlError(
            f"{where} could not be reached: {error}. Check the address and the token "
            "(RAY_AUTH_TOKEN_PATH), or run without Ray: --on processes"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def uses_gpus(num_workers: int) -> bool:
    """Whether `num_workers` get a GPU each: what the cluster has decides, not this machine.

    Raises ConfigError if there are some, but too few: the workers would be waited for for ever.
    """
    import ray

    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if 0 < num_gpus < num_workers:
        raise ConfigError(
            f"{num_workers} ranks or workers for the {num_gpus} GPUs that Ray sees: each needs "
            f"one. Ask for at most {num_gpus}, or compute on the CPU with CUDA_VISIBLE_DEVICES= "
            "before the command"
        )
    return num_gpus > 0


@cache
def _own_token() -> Path:
    """A file with a token of this process's own, which Ray's processes get by the environment.

    One a process, because Ray reads it once and never again.
    """
    directory = Path(tempfile.mkdtemp(prefix="txl-ray-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path
