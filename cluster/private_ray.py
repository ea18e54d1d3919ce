"""A private Ray on this machine: access token, shutdown, and cleanup after killed launchers.

Each launcher has a folder `txl-ray-*` in the temporary directory with the token of its Ray, and
holds a lock on it until it ends. The kernel releases the lock however the launcher ends. A folder
that can be locked therefore belongs to a dead launcher, also if containers share the directory.
"""

import atexit
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil

from data_pipeline.errors import ConfigError
from data_pipeline.system.files import try_lock

PREFIX = "txl-ray-"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
LOOPBACK = "127.0.0.1"
_LOCK, _SESSION = "lock", "session"
_KILL_SECONDS = 5.0
"""Time limit for the kernel to end killed processes."""


@cache
def access_token() -> Path:
    """A file with the token of this process's Ray, readable by this user only.

    One per process, because Ray reads the token only once.
    """
    clean_up_dead_launchers(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    # Renamed to its final name after it is locked: another launcher never sees it unlocked. The
    # descriptor stays open, and so locked, until this process ends.
    descriptor = os.open(directory / "new-lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not try_lock(descriptor, if_unsupported=False):
        raise ConfigError(
            f"{directory.parent} is on a file system without locks, so another launcher would take "
            "this one for dead and end its Ray. Set TMPDIR to a local directory"
        )
    os.write(descriptor, f"pid {os.getpid()}\n".encode())
    (directory / "new-lock").rename(directory / _LOCK)
    return path


def record_session(directory: str) -> None:
    """Record Ray's session directory, which identifies processes that hide their environment."""
    access_token().with_name(_SESSION).write_text(directory)


def end_private_ray() -> None:
    """Kill every process of this process's Ray, in any state, and remove its token."""
    kill_private_ray()
    shutil.rmtree(access_token().parent, ignore_errors=True)


def kill_private_ray() -> None:
    """Kill every process of this process's Ray. Another Ray can be started with the same token."""
    launcher = psutil.Process()

    def running() -> list[psutil.Process]:
        children = filter(_is_ray, launcher.children(recursive=True))
        return [*children, *ray_processes(access_token())]

    # Repeated, because a process may have started another one between the listing and its death.
    while processes := running():
        _kill(processes)


def clean_up_dead_launchers(parent: Path) -> None:
    """Kill the Ray processes of dead launchers, and remove their folders in `parent`."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        # OSError: the folder is another user's, or another launcher has just removed it.
        with suppress(OSError), lock.open("rb+") as file:
            if not try_lock(file.fileno(), if_unsupported=False):
                continue
            while processes := ray_processes(lock.with_name("token")):
                _kill(processes)
            shutil.rmtree(lock.parent)


def ray_processes(token: Path) -> list[psutil.Process]:
    """The Ray processes that were started with this token, without the calling process."""
    record = token.with_name(_SESSION)
    session = record.read_text() if record.exists() else None
    processes = []
    for process in filter(_is_ray, psutil.process_iter()):
        with suppress(psutil.Error):
            # Ray's agents overwrite their environment when they set their title. They are
            # identified by their open log files, which are in the session directory.
            if process.environ().get(TOKEN_VARIABLE) == str(token) or (
                session is not None
                and any(file.path.startswith(f"{session}/") for file in process.open_files())
            ):
                processes.append(process)
    return [process for process in processes if process.pid != os.getpid()]


def _is_ray(process: psutil.Process) -> bool:
    """Whether Ray started this process; false for the tracking process that a rank started."""
    with suppress(psutil.Error):
        return any(word.startswith(_ray_commands()) for word in process.cmdline())
    return False


@cache
def _ray_commands() -> tuple[str, ...]:
    spec = find_spec("ray")
    locations = (spec and spec.submodule_search_locations) or []
    return ("ray::", "ray-dashboard", *(f"{location}/" for location in locations))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + _KILL_SECONDS
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_alive(process: psutil.Process) -> bool:
    # Not psutil's wait, which also waits until the parent, often pid 1, has read the exit code.
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def loopback_only() -> Iterator[None]:
    """A Ray that starts inside this context listens on 127.0.0.1 only, with all its servers."""
    # They do so if the node's address is 127.0.0.1. But Ray replaces that by the host's address,
    # except on systems on which it does not support clusters.
    from ray._private import ray_constants

    previous = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = previous
