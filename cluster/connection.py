"""Connect to Ray: to a running cluster, or to a private Ray that this process starts.

Ray reads its environment variables when it is imported, so this module imports it late.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.address import check_cluster
from cluster.private_ray import (
    LOOPBACK,
    TOKEN_VARIABLE,
    access_token,
    loopback_only,
    record_session,
)
from txl_dist.errors import ConfigError, TxlError


@contextmanager
def ray_connection(address: str | None, *, num_cpus: int) -> Iterator[None]:
    """Connect while the context is open. `address` None: start a private Ray with `num_cpus`.

    Raises ConfigError within seconds if no cluster responds at `address`.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # deduplication cuts tracebacks in the middle
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # has the callback of failure_callback.py
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # `rank_starts.py` acts on preemption notices. Ray Train's own watcher only ends ranks.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ[TOKEN_VARIABLE] = str(access_token())
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    if address is None:
        _start_private(num_cpus)
    else:
        _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def _start_private(num_cpus: int) -> None:
    import ray

    try:
        with loopback_only():
            ray.init(
                "local",  # ignore RAY_ADDRESS and clusters that `ray start` left on this machine
                num_cpus=num_cpus,
                include_dashboard=True,  # without it Ray logs a warning every few seconds
                dashboard_host=LOOPBACK,
                _node_ip_address=LOOPBACK,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        record_session(ray._private.worker._global_node.get_session_dir_path())
    except (OSError, RuntimeError, ValueError) as error:
        raise TxlError(
            f"a private Ray could not be started: {error}. Run without Ray: --on processes"
        ) from error


def _connect(address: str) -> None:
    import ray

    check_cluster(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at --on {address} responds, but cannot be used: {error}. This "
            "machine must be one of its nodes, with the same versions of Ray and Python"
        ) from error


def uses_gpus(num_workers: int) -> bool:
    """Whether each of `num_workers` gets a GPU: true if the cluster has any.

    Raises ConfigError if the cluster has some, but too few: Ray would wait without limit.
    """
    import ray

    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if 0 < num_gpus < num_workers:
        raise ConfigError(
            f"{num_workers} ranks or workers need one GPU each, and Ray has {num_gpus}. Start at "
            f"most {num_gpus}, or use CPUs: put CUDA_VISIBLE_DEVICES= before the command"
        )
    return num_gpus > 0
