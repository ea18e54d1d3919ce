"""The checks of one node: versions, devices, run directory, dataset; and what to check.

On the machine of the command the expected versions are those of `constraints.txt`; on the nodes of
a cluster they are those of the machine of the command.

A run needs files that are synced, renamed and locked (checkpoints, LATEST). Some network file
systems lack locks. The probe file is removed.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

import txl_dist
from data_pipeline.errors import TxlError, counted
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_files import check_sizes
from data_pipeline.system.files import DISK_FULL, try_lock, write_file
from data_pipeline.system.remote_path import dataset_path
from txl_dist.doctor.finding import Check, Finding, note, ok, problem, run_checks
from txl_dist.doctor.services import (
    DASHBOARD_PORT,
    check_exposure,
    check_tracking,
    existing_parent,
)
from txl_dist.runtime.process import source_digest

CONSTRAINTS = "constraints.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What to check. Frozen: every node of a cluster gets a copy."""

    run: str | None = None
    """Absolute path of a run directory, which exists or will be created; None: not checked."""
    data: str | None = None
    """Absolute path or URL of a dataset; None: not checked."""
    min_free_bytes: int = 0
    """Free space that the run directory needs."""
    skip: frozenset[str] = field(default_factory=frozenset)
    """Names of checks to leave out."""
    expected_versions: Mapping[str, str] = field(default_factory=dict)
    """By name; {}: those of constraints.txt."""
    versions_of: str = CONSTRAINTS
    """Where `expected_versions` come from."""
    dashboard_ports: tuple[int, ...] = (DASHBOARD_PORT,)
    """Ports to check for open dashboards."""


@runtime_checkable
class NodeChecker(Protocol):
    """A launcher that can check every machine on which it starts ranks."""

    def check_nodes(self, request: DoctorRequest) -> list[Finding]:
        """All findings about these machines."""


def node_checks(request: DoctorRequest) -> dict[str, Check]:
    """Name -> check, of the node that calls it."""
    expected = request.expected_versions or pinned_versions()
    checks: dict[str, Check] = {
        "versions": partial(check_versions, expected, source=request.versions_of),
        "devices": check_devices,
        "tracking": partial(check_tracking, os.environ.get("MLFLOW_TRACKING_URI")),
        "exposure": partial(check_exposure, request.dashboard_ports),
    }
    if request.run is not None:
        checks["storage"] = partial(
            check_run_directory, request.run, min_free_bytes=request.min_free_bytes
        )
    if request.data is not None:
        checks["dataset"] = partial(check_dataset, request.data)
    return {name: check for name, check in checks.items() if name not in request.skip}


def check_this_machine(request: DoctorRequest, node: str | None = None) -> list[Finding]:
    """All checks of one node, in this process. `node` None: the name of this host."""
    return run_checks(node_checks(request), node=node or socket.gethostname())


LIBRARIES = ("torch", "deepspeed", "ray", "mlflow", "webdataset", "numpy")
CODE = "txl-dist"
MISSING = "not installed"


def installed_versions() -> dict[str, str]:
    """Name -> version, of Python, LIBRARIES and our code."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        CODE: f"{_version(CODE)} (sources {source_digest()[:12]})",
    }


def pinned_versions(constraints: Path | None = None) -> dict[str, str]:
    """Versions of LIBRARIES in `constraints.txt`, which a wheel has in the package; else {}."""
    package = Path(txl_dist.__file__).parent
    places = [constraints] if constraints else [package / CONSTRAINTS, package.parent / CONSTRAINTS]
    path = next(filter(Path.is_file, places), None)
    if path is None:
        return {}
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;#]+)", path.read_text(encoding="utf-8")))
    return {name: pins[name] for name in LIBRARIES if name in pins}


def check_versions(expected: Mapping[str, str], *, source: str) -> list[Finding]:
    """Compare with `expected`, which are the versions of `source`, e.g. "constraints.txt"."""
    installed = installed_versions()
    summary = ", ".join(f"{name} {found}" for name, found in installed.items())
    missing = [name for name, found in installed.items() if found == MISSING]
    different = [
        name
        for name, value in expected.items()
        if name not in missing and _public(installed[name]) != _public(value)
    ]
    findings = [
        problem(
            f"{name} {installed[name]}",
            expected=f"{name} {expected.get(name, 'installed')}" + f" ({source})" * bool(expected),
            advice="install the same sources of txl-dist and its libraries on every node (make "
            "setup, or pip install --constraint constraints.txt), and start its Ray again",
        )
        for name in (*missing, *different)
    ]
    if not expected:
        findings.append(
            note(
                f"{summary}; not compared: the package has no constraints.txt",
                advice="install the wheel, or a checkout by make setup, to compare versions",
            )
        )
    return findings or [ok(summary)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return MISSING


def _public(text: str) -> str:
    """Without the build: 2.13.0+cpu and 2.13.0+cu130 have the same sources."""
    return text.partition("+")[0]


# --- devices --------------------------------------------------------------------------------------

_NVIDIA_SMI_SECONDS = 10.0
MIN_SHM_BYTES = 2**30
"""NCCL exchanges data of GPUs on one node through /dev/shm; Docker's default is 64 MiB."""


def check_devices() -> list[Finding]:
    """GPUs if the driver lists some, else CPUs."""
    gpus = list_gpus()
    return check_gpus(gpus) if gpus else [check_cpus()]


def list_gpus() -> list[str]:
    """One line per GPU of this machine: name, driver, GPU memory. [] without NVIDIA's tools."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        ended = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return ended.stdout.strip().splitlines()


def check_gpus(listed: list[str]) -> list[Finding]:
    """Whether torch can use the GPUs that the driver lists."""
    import torch

    from txl_dist.model.devices import triton_unavailable_reason

    names = "; ".join(sorted(set(listed)))
    summary = f"{counted(len(listed), 'GPU')} ({names}), torch {torch.__version__}"
    if torch.version.cuda is None:
        return [
            problem(
                f"{summary}, a build for CPUs",
                expected="a build of torch for CUDA",
                advice="install torch from the index for CUDA (https://pytorch.org), or hide the "
                "GPUs: CUDA_VISIBLE_DEVICES=",
            )
        ]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [ok(f"{summary}; all are hidden by CUDA_VISIBLE_DEVICES=")]
    if not torch.cuda.is_available():
        return [
            problem(
                f"{summary} for CUDA {torch.version.cuda}, which finds no usable GPU",
                expected="torch.cuda.is_available()",
                advice="the driver is too old for this CUDA, or does not run: see nvidia-smi",
            )
        ]
    findings = []
    if reason := triton_unavailable_reason(torch.device("cuda")):
        findings.append(
            problem(
                f"{summary}: GPUs need triton, and {reason}",
                expected="the package triton, a C compiler, and compute capability 8.0 or newer",
                advice="mend that, or use the CPUs: CUDA_VISIBLE_DEVICES= before the command",
            )
        )
    shared = shutil.disk_usage("/dev/shm").total
    if shared < MIN_SHM_BYTES:
        findings.append(
            note(
                f"/dev/shm has {_gib(shared)}",
                expected=f"{_gib(MIN_SHM_BYTES)} or more for NCCL",
                advice="docker run --shm-size=8g; on Kubernetes mount an emptyDir of medium Memory",
            )
        )
    return findings or [ok(f"{summary}, {torch.cuda.device_count()} visible")]


def check_cpus() -> Finding:
    """The CPUs that this process may use (by taskset or Slurm), and the RAM of the machine."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ok(f"no GPU; {usable} of {total} CPUs, {_gib(ram)} host memory")


def check_dataset(data: str) -> list[Finding]:
    """Load the manifest of a directory or URL, and compare the sizes of all files with it."""
    directory = dataset_path(data)
    try:
        manifest = load_manifest(directory)
        for split in manifest.splits.values():
            check_sizes(directory, split.shards)
    except TxlError as error:
        text, _, advice = str(error).partition(". ")
        return [
            problem(
                text,
                expected="a complete dataset, at the same path on every node",
                advice=advice or "check the path, and the mount on this node",
            )
        ]
    tokens = sum(split.tokens for split in manifest.splits.values())
    return [
        ok(
            f"{directory}: {tokens:,} tokens in {counted(len(manifest.shards), 'shard')}, digest "
            f"{manifest.digest[:12]}",
            dataset=manifest.digest,
        )
    ]


# --- the run directory ----------------------------------------------------------------------------

PROBE_PREFIX = ".txl-doctor-"
PROBE_BYTES = 2**20


def check_run_directory(run: str, *, min_free_bytes: int) -> list[Finding]:
    """Write, sync, read, rename and lock a file in `run` (or where it will be created)."""
    directory = existing_parent(Path(run))
    name = f"{directory}" if directory == Path(run) else f"{directory} (for {run})"
    findings = [*_use(directory, name), *_nfs(directory, name)]
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < min_free_bytes:
        findings.append(
            problem(
                f"{name}: {_gib(free_bytes)} free",
                expected=f"at least {_gib(min_free_bytes)} (--min-free-gib)",
                advice="free some space, or choose another run directory",
            )
        )
    done = f"{name}: write, sync, rename and lock work; {_gib(free_bytes)} free"
    return findings or [ok(done)]


def _use(directory: Path, name: str) -> Iterator[Finding]:
    path = directory / f"{PROBE_PREFIX}{uuid.uuid4().hex}.tmp"
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


def _nfs(directory: Path, name: str) -> Iterator[Finding]:
    """NFS clients remember for up to a minute that a file does not exist (nfs(5), lookupcache)."""
    kind, options = mount_of(directory)
    if kind.startswith("nfs") and not {"lookupcache=positive", "lookupcache=pos"} & options:
        yield note(
            f"{name}: NFS, mounted without lookupcache=positive",
            expected="other hosts see stop requests and parts of checkpoints within seconds",
            advice="mount with lookupcache=positive,acdirmin=1,acdirmax=5",
        )


def mount_of(directory: Path) -> tuple[str, set[str]]:
    """Type and options of the file system of a directory."""
    resolved = directory.resolve()
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(mount.mountpoint)
    ]
    # The last one, if several are mounted at one place.
    mounts.sort(key=lambda mount: len(Path(mount.mountpoint).parts))
    return mounts[-1].fstype, set(mounts[-1].opts.split(","))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
