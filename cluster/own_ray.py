"""The private Ray of one launcher: access token, shutdown, and cleanup after killed launchers.

Its token lies in a folder `txl-ray-*` of the temporary directory, which a launcher keeps locked as
long as it lives. The kernel releases the lock however the launcher ends, so a folder that can be
locked belongs to a dead one, also where several containers share the directory.
"""

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil

from data_pipeline.storage.locks import try_lock

PREFIX = "txl-ray-"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
LOOPBACK = "127.0.0.1"
_LOCK, _SESSION = "lock", "session"
_END_SECONDS = 5.0
"""How long the kernel may take to end killed processes."""


@cache
def own_token() -> Path:
    """A file with a token that only this process and its Ray know.

    One per process, because Ray reads it once and never again.
    """
    remove_leftovers(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    # Locked before it has its name: nobody can find it unlocked. Open as long as this process.
    descriptor = os.open(directory / "new-lock", os.O_RDWR | os.O_CREAT, 0o600)
    try_lock(descriptor)
    os.write(descriptor, f"pid {os.getpid()}\n".encode())
    (directory / "new-lock").rename(directory / _LOCK)
    return path


def remove_leftovers(parent: Path) -> None:
    """End the Ray processes of launchers that were killed, and remove their token folders."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb+") as file:  # of another user, or just removed
            if not try_lock(file.fileno()):
                continue
            while found := processes_with(lock.with_name("token")):
                _end(found)
            shutil.rmtree(lock.parent)


def end_own_ray() -> None:
    """Kill every process of this process's Ray, whatever state they are in."""
    own = psutil.Process()
    # Again, because one that was just starting others may have been asked too early.
    while found := [*filter(_is_ray, own.children(recursive=True)), *processes_with(own_token())]:
        _end(found)
    shutil.rmtree(own_token().parent, ignore_errors=True)


def record_session(directory: str) -> None:
    """Note where the Ray that has started keeps its logs, for whoever may have to end it."""
    own_token().with_name(_SESSION).write_text(directory)


def processes_with(token: Path) -> list[psutil.Process]:
    """Ray's processes that belong to the launcher with this token, other than itself."""
    record = token.with_name(_SESSION)
    session = record.read_text() if record.exists() else None
    found = []
    for process in filter(_is_ray, psutil.process_iter()):
        with suppress(psutil.Error):
            # Ray's agents lose their environment with the change of their title, not their logs.
            if process.environ().get(TOKEN_VARIABLE) == str(token) or (
                session is not None
                and any(file.path.startswith(f"{session}/") for file in process.open_files())
            ):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def _is_ray(process: psutil.Process) -> bool:
    """Whether this is a process of Ray's, not one of ours that a rank started (tracking)."""
    with suppress(psutil.Error):
        return any(word.startswith(_ray_commands()) for word in process.cmdline())
    return False


@cache
def _ray_commands() -> tuple[str, ...]:
    spec = find_spec("ray")
    places = (spec and spec.submodule_search_locations) or []
    return ("ray::", "ray-dashboard", *(f"{place}/" for place in places))


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_SECONDS)


@contextmanager
def loopback_only() -> Iterator[None]:
    """While a Ray starts in here, every one of its servers listens on 127.0.0.1 and nowhere else.

    They all do so when the node's address is 127.0.0.1; but Ray replaces that by the address of
    the host, except on systems for which it has no clusters.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
