"""Connect to Ray: to a running cluster, or to a private Ray that this process starts.

Ray reads its environment variables when it is imported, so this module imports it late. `ray.init`
has no time limit for an address at which nothing responds, so `check_cluster` asks first.

Nothing but its logs (/tmp/ray) is left of a private Ray when the context ends. If the launcher is
killed, Ray's processes end by themselves, the last of them (its agents) after about a minute.
"""

import atexit
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from data_pipeline.system.signals import (
    STOPPED_EXIT_CODE,
    block_stop_signals,
    exit_without_teardown,
)
from txl_dist.errors import ConfigError, TxlError

POLL_SECONDS = 0.2
SHUTDOWN_SECONDS = 15.0
HEAD_SECONDS = 30.0
"""Time limit for the head node to respond. Ray itself aborts this process after 60 seconds."""

LOOPBACK = "127.0.0.1"
ACCESS_TOKEN = secrets.token_hex(32)
"""The token of this process's private Ray. One per process, as Ray reads it only once."""

log = logging.getLogger(__name__)
_ray_output = logging.getLogger("ray.txl")


@contextmanager
def ray_connection(address: str | None, *, num_cpus: int) -> Iterator[None]:
    """Connect while the context is open. `address` None: start a private Ray with `num_cpus`.

    Raises ConfigError within seconds if no cluster responds at `address`.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # deduplication cuts tracebacks in the middle
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ACCESS_TOKEN}
    import ray
    from ray._private import ray_constants

    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {
            "num_cpus": num_cpus,
            "include_dashboard": True,  # without it Ray logs a warning every few seconds
            "dashboard_host": LOOPBACK,
            "_node_ip_address": LOOPBACK,
        }
    else:
        check_cluster(address)
    # All servers of a Ray listen on 127.0.0.1 only if that is the node's address. But Ray replaces
    # it by the host's address, except on systems on which it does not support clusters.
    is_cluster = address is not None and ray_constants.ENABLE_RAY_CLUSTER
    try:
        with patch.object(ray_constants, "ENABLE_RAY_CLUSTER", is_cluster):
            # "local" ignores RAY_ADDRESS and clusters that `ray start` left on this machine.
            ray.init(address or "local", **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray at --on {address or 'ray'} cannot be used: {error}. This machine must be one of "
            "the nodes of a cluster, with the same versions of Ray and Python. Without Ray: --on "
            "processes"
        ) from error
    try:
        yield
    finally:
        processes = []
        if address is None:
            _skip_grace_periods()
            processes = ray_processes()  # now: Ray's agents lose their parent
        ray.shutdown()
        _kill(processes)


class ConnectionThread(threading.Thread):
    """Holds a `ray_connection` while `work` runs.

    It lives as long as Ray's processes: Ray has the kernel kill them when the thread that started
    them ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, address: str | None, *, num_cpus: int) -> None:
        super().__init__(name="ray", daemon=True)
        self.connected, self.leave, self.ended = (threading.Event() for _ in range(3))
        self.work: Callable[[], object] = self.leave.wait
        self.error: TxlError | None = None
        self.is_private = address is None
        self.place = "Ray" if address is None else f"the Ray cluster at {address}"
        self._address, self._num_cpus = address, num_cpus

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The connection, for the main thread: a signal interrupts it also while Ray starts or
        ends.

        Python handles no signal in the main thread during a call into Ray, so this thread connects
        and disconnects. If that is interrupted or blocks, Ray is abandoned.
        """
        log.warning("waiting for %s", self.place)
        self.start()
        exit_code = STOPPED_EXIT_CODE
        try:
            self._wait_until(self.connected)
            if self.error:
                raise self.error
            yield
            exit_code = 0
        except Exception as error:
            exit_code = error.exit_code if isinstance(error, TxlError) else 1
            raise
        finally:
            try:
                if self.connected.is_set():
                    self.leave.set()
                    self._wait_until(self.ended, timeout_seconds=SHUTDOWN_SECONDS)
            finally:
                if not self.ended.is_set():
                    self.abandon(exit_code)

    def abandon(self, exit_code: int) -> None:
        """End this process without Ray's thread and exit handlers, which may block.

        Returns: the exit happens when the interpreter ends. Kills a private Ray now.
        """
        if self.is_private:
            _kill(ray_processes())
        atexit.register(exit_without_teardown, exit_code)

    def run(self) -> None:
        # The processes of a private Ray inherit the mask. A signal to every process of the job must
        # not end them while the ranks still have to save; and Ctrl-C reaches all processes of the
        # terminal, and only the main thread decides what to do.
        block_stop_signals()
        try:
            with ray_connection(self._address, num_cpus=self._num_cpus):
                self.connected.set()
                self.work()
        except TxlError as error:
            self.error = error
        except Exception as error:
            _ray_output.warning("%s", error)
            self.error = TxlError(
                f"Ray ended with an error: {lines_of(error)[0]}. Run the same command again"
            )
        self.ended.set()
        self.connected.set()

    def _wait_until(self, event: threading.Event, *, timeout_seconds: float = math.inf) -> None:
        """Wait for an event of this thread, with the SIGTERM handler of this process: when Ray
        connects, it replaces it by one in C++ that aborts this process.
        """
        handler, deadline = signal.getsignal(signal.SIGTERM), time.monotonic() + timeout_seconds
        is_set = False
        while not is_set and time.monotonic() < deadline:
            is_set = event.wait(POLL_SECONDS)
            if threading.current_thread() is threading.main_thread() and callable(handler):
                signal.signal(signal.SIGTERM, handler)


def _skip_grace_periods() -> None:
    """Make `ray.shutdown` kill the processes of a private Ray without a grace period.

    It sends SIGTERM and waits a second for each process. They have inherited a mask that blocks it
    (see `ConnectionThread.run`), so each second passes; and nothing is left for them to do.
    """
    import ray

    if node := ray._private.worker._global_node:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **_: kill(check_alive=False)


RESPONSE_SECONDS = 5.0
"""Time limit for the connection, and again for the response."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of every gRPC client: connection preface and empty SETTINGS (RFC 9113, 3.4)."""
_SETTINGS_FRAME = 4


def check_cluster(address: str) -> None:
    """Raise ConfigError, within seconds, unless a Ray cluster responds and accepts our token.

    `address` is `auto`, that of a cluster, or that of a Ray client server.
    """
    from ray import exceptions
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        head = canonicalize_bootstrap_address(address.partition("://")[2] or address)
        if head is None or not head.rpartition(":")[2].isdigit():
            raise ValueError("that is not host:port")
        if not responds(head):
            raise ValueError(f"nothing answers at {head}")
        if "://" not in address:  # a Ray client server is no GcsServer, and has a time limit
            GcsClient(address=head)
    except (OSError, ValueError, exceptions.RayError) as error:
        raise ConfigError(
            f"no Ray cluster can be used at --on {address}: {error}. Check that it runs (ray "
            "status there), its port (default 6379), the network, and its token on this machine "
            "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH); or use --on ray, which starts a private "
            "Ray"
        ) from None


def responds(host_and_port: str) -> bool:
    """Whether a gRPC server responds there. An open port alone may belong to any program."""
    host, _, port = host_and_port.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), RESPONSE_SECONDS
        ) as connection:
            connection.settimeout(RESPONSE_SECONDS)
            connection.sendall(_HTTP2_PREFACE)
            # An HTTP/2 server sends SETTINGS first; a frame header has 9 bytes, byte 3 is its type.
            header = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == 9 and header[3] == _SETTINGS_FRAME


@contextmanager
def ray_log(path: Path | None) -> Iterator[None]:
    """While connected to Ray: write Ray's log and the messages of its daemons to `path` only.

    They can fill pages of the terminal when a node dies. None: write them nowhere.
    """
    from ray._private import worker

    def write(data: dict[str, Any], *_: object, **__: object) -> None:
        for line in data["lines"]:
            _ray_output.warning("%s: %s", data.get("pid", "ray"), line)

    handler: logging.Handler = logging.NullHandler()
    if path is not None:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
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


def lines_of(error: BaseException) -> list[str]:
    """The lines of an error of Ray, which may have pages; its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]


def ray_processes() -> list[psutil.Process]:
    """The processes of this process's private Ray, without those that ranks have started."""
    spec = find_spec("ray")  # not `import ray`, which may be going on in another thread
    locations = (spec and spec.submodule_search_locations) or []
    programs = ("ray::", "ray-dashboard", *(f"{location}/" for location in locations))
    processes = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(word.startswith(programs) for word in child.cmdline()):
                processes.append(child)
    return processes


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
