"""A connection to Ray: one of our own on this machine, or to a running cluster.

Our own listens on 127.0.0.1 only and asks for a token that nobody else has (`own_ray.py`). Ray's
variables must be set before Ray is imported, which is why this module imports it late.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.address import check_cluster
from cluster.own_ray import LOOPBACK, TOKEN_VARIABLE, loopback_only, own_token, record_session
from txl_dist.errors import ConfigError, TxlError


@contextmanager
def ray_session(address: str | None, *, num_cpus: int) -> Iterator[None]:
    """Connect while the context is open. `num_cpus` is the size of a private Ray.

    Raises ConfigError within seconds if no cluster answers at `address`.
    """
    # Deduplication cuts tracebacks in the middle.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ[TOKEN_VARIABLE] = str(own_token())
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    if address is None:
        _start_own(num_cpus)
    else:
        _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def _start_own(num_cpus: int) -> None:
    import ray

    try:
        with loopback_only():
            ray.init(
                "local",  # not the cluster that RAY_ADDRESS or an earlier `ray start` names
                num_cpus=num_cpus,
                include_dashboard=True,  # without it Ray floods the log with complaints
                dashboard_host=LOOPBACK,
                _node_ip_address=LOOPBACK,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        record_session(ray._private.worker._global_node.get_session_dir_path())
    except (OSError, RuntimeError, ValueError) as error:
        raise TxlError(
            f"a local Ray could not be started: {error}. Run without Ray: --on processes"
        ) from error


def _connect(address: str) -> None:
    import ray

    check_cluster(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at --on {address} answers, but cannot be used: {error}. This machine "
            "must be a node of it, with the same versions of Ray and Python"
        ) from error


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
