"""The run directory: whether one node can use it, and whether the nodes see each other's files.

A run needs files that are synced, renamed and locked (checkpoints, LATEST), and the ranks of all
nodes write into one directory. Some network file systems lack locks, or report success for files
that other nodes do not see. All probe files are removed.
"""

import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from data_pipeline.system.files import DISK_FULL, try_lock, write_file
from txl_dist.doctor.finding import Finding, note, ok, problem

PROBE_BYTES = 2**20
MIN_FREE_INODES = 10_000
"""A run with several checkpoints of many ranks has some thousand files."""
SHARED_WAIT_SECONDS = 10.0
"""NFS clients cache attributes for some seconds, so a new file may appear late on other nodes."""
_POLL_SECONDS = 0.2
_PREFIX = ".txl-doctor-"

ProbeResult = Literal["seen", "missing", "other content", "lock not seen"]
"""How one node sees the probe of another."""
UNSEEN: frozenset[ProbeResult] = frozenset({"missing", "other content"})


def check_run_directory(run: str, *, min_free_bytes: int) -> list[Finding]:
    """Write, sync, read, rename and lock a file in `run` (or where it will be created)."""
    directory = existing_parent(Path(run))
    name = f"{directory}" if directory == Path(run) else f"{directory} (for {run})"
    findings = list(_use(directory, name))
    findings += _space(directory, name, min_free_bytes=min_free_bytes)
    findings += _nfs(directory, name, Path("/proc/self/mounts"))
    return findings or [ok(f"{name}: write, sync, rename and lock work; {_free_text(directory)}")]


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest parent that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _use(directory: Path, name: str) -> Iterator[Finding]:
    path = directory / f"{_PREFIX}{uuid.uuid4().hex}.tmp"
    data = os.urandom(PROBE_BYTES)
    step = "write and sync a file in"
    try:
        write_file(path, b"older")
        write_file(path, data)  # a rename over an existing file, as LATEST is updated
        step = "read a file back from"
        if path.read_bytes() != data:
            yield problem(
                f"{name}: a file has other content than was written",
                expected="the same content",
                advice="do not use this file system; check its disk or server",
            )
        step = "lock a file in"
        with path.open("rb+") as file:
            if not try_lock(file.fileno(), if_unsupported=False):
                yield note(
                    f"{name}: flock is not supported",
                    expected="locks, which refuse a second run in the same directory",
                    advice="mount with locks (NFS: without nolock; Lustre: flock), or make sure "
                    "that no directory is used by two runs",
                )
    except OSError as error:
        full = error.errno in DISK_FULL
        yield problem(
            f"{name}: cannot {step} it: {error.strerror or error}",
            expected="a directory that every node can write",
            advice="free space or inodes, or choose another run directory"
            if full
            else "check the mount, its permissions and the user of the Ray node",
        )
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _space(directory: Path, name: str, *, min_free_bytes: int) -> Iterator[Finding]:
    free, inodes = shutil.disk_usage(directory).free, os.statvfs(directory)
    if free < min_free_bytes:
        yield problem(
            f"{name}: {_gib(free)} free",
            expected=f"at least {_gib(min_free_bytes)} (--min-free-gib)",
            advice="free some space, or choose another run directory",
        )
    # Some file systems (btrfs) have no fixed number of inodes and report 0.
    if inodes.f_files > 0 and inodes.f_favail < MIN_FREE_INODES:
        yield problem(
            f"{name}: {inodes.f_favail:,} inodes free",
            expected=f"at least {MIN_FREE_INODES:,}",
            advice="remove files there, or choose another run directory",
        )


def _nfs(directory: Path, name: str, mounts: Path) -> Iterator[Finding]:
    """NFS clients remember for up to a minute that a file does not exist (nfs(5), lookupcache)."""
    kind, options = mount_of(directory, mounts)
    if kind.startswith("nfs") and not {"lookupcache=positive", "lookupcache=pos"} & options:
        yield note(
            f"{name}: NFS, mounted without lookupcache=positive",
            expected="other hosts see stop requests and parts of checkpoints within seconds",
            advice="mount with lookupcache=positive,acdirmin=1,acdirmax=5",
        )


def mount_of(directory: Path, mounts: Path) -> tuple[str, set[str]]:
    """Type and options of the file system of a directory, by a file like /proc/self/mounts."""
    found: tuple[int, str, set[str]] = (-1, "", set())
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, place, kind, options, *_ = line.split()
        point = Path(place.replace(r"\040", " "))
        # The last one, if several are mounted at one place.
        if directory.resolve().is_relative_to(point) and len(point.parts) >= found[0]:
            found = len(point.parts), kind, set(options.split(","))
    return found[1], found[2]


def _free_text(directory: Path) -> str:
    return f"{_gib(shutil.disk_usage(directory).free)} free"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


class SharedProbe:
    """A file of this node in a shared directory, locked until `remove`."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.name = f"{_PREFIX}{socket.gethostname()}-{uuid.uuid4().hex}.tmp"

    def place(self) -> str:
        """Create the file; returns its name, which is its content as well."""
        path = self.directory / self.name
        write_file(path, self.name.encode())
        self._file = path.open("rb+")
        try_lock(self._file.fileno())
        return self.name

    def read(self, names: Mapping[str, str]) -> dict[str, ProbeResult]:
        """Node -> how this node sees the file of that node; `names` are those of the files."""
        deadline = time.monotonic() + SHARED_WAIT_SECONDS
        while True:
            results = {node: self._read_one(name) for node, name in names.items()}
            if not UNSEEN & set(results.values()) or time.monotonic() > deadline:
                return results
            time.sleep(_POLL_SECONDS)
            os.scandir(self.directory).close()  # makes an NFS client read the directory again

    def _read_one(self, name: str) -> ProbeResult:
        try:
            with (self.directory / name).open("rb+") as file:
                if file.read() != name.encode():
                    return "other content"
                # The other process holds the lock, so it must not be free here.
                return "lock not seen" if try_lock(file.fileno()) else "seen"
        except OSError:
            return "missing"

    def remove(self) -> None:
        """Release the lock and remove the file."""
        with contextlib.suppress(OSError, AttributeError):
            self._file.close()
        with contextlib.suppress(OSError):
            (self.directory / self.name).unlink()
