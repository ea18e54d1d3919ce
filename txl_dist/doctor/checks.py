"""The checks of one node: versions, devices, run directory, dataset, tracking; and what to check.

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
from collections.abc import Iterator
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
from data_pipeline.system.sources import shown
from txl_dist.doctor.exposure import DASHBOARD_PORT, check_exposure
from txl_dist.doctor.finding import Check, Finding, note, ok, problem, run_checks
from txl_dist.runtime.process import source_digest


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
    dashboard_ports: tuple[int, ...] = (DASHBOARD_PORT,)
    """Ports to check for open dashboards."""


@runtime_checkable
class NodeChecker(Protocol):
    """A launcher that can check every machine on which it starts ranks."""

    def check_nodes(self, request: DoctorRequest) -> list[Finding]:
        """Return all findings about these machines."""


def check_this_machine(request: DoctorRequest, node: str | None = None) -> list[Finding]:
    """Run all checks of one node, in this process. `node` None: the name of this host."""
    checks: dict[str, Check] = {
        "versions": check_versions,
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
    wanted = {name: check for name, check in checks.items() if name not in request.skip}
    return run_checks(wanted, node=node or socket.gethostname())


LIBRARIES = ("torch", "deepspeed", "ray", "mlflow", "webdataset", "numpy")
MISSING = "not installed"


def installed_versions() -> dict[str, str]:
    """Name -> version, of Python, LIBRARIES and our code."""

    def version_of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return MISSING

    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in LIBRARIES},
        "txl-dist": f"{version_of('txl-dist')} (sources {source_digest()[:12]})",
    }


def pinned_versions() -> dict[str, str]:
    """Return the versions of LIBRARIES in `constraints.txt`, which a wheel has in the package."""
    package = Path(txl_dist.__file__).parent
    places = (directory / "constraints.txt" for directory in (package, package.parent))
    path = next(filter(Path.is_file, places), None)
    if path is None:
        return {}
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;#]+)", path.read_text(encoding="utf-8")))
    return {name: pins[name] for name in LIBRARIES if name in pins}


def check_versions() -> Iterator[Finding]:
    """Compare what is installed with `constraints.txt`."""
    installed, pins = installed_versions(), pinned_versions()
    # Without the build: 2.13.0+cpu and 2.13.0+cu130 have the same sources.
    public = {name: found.partition("+")[0] for name, found in installed.items()}
    yield ok(
        ", ".join(f"{name} {found}" for name, found in installed.items()),
        same_on_all=[f"{name} {found}" for name, found in public.items()],
    )
    for name, found in installed.items():
        if found == MISSING or public[name] != pins.get(name, public[name]).partition("+")[0]:
            yield problem(
                f"{name} {found}",
                expected=f"{name} {pins.get(name, 'installed')} (constraints.txt)",
                advice=SAME_SOURCES,
            )
    if not pins:
        yield note(
            "versions are not compared: the package has no constraints.txt",
            advice="install the wheel, or a checkout by make setup, to compare versions",
        )


SAME_SOURCES = (
    "install the same sources of txl-dist and its libraries on every node (make setup, or pip "
    "install --constraint constraints.txt), and start its Ray again"
)


# --- devices --------------------------------------------------------------------------------------

_NVIDIA_SMI_SECONDS = 10.0
MIN_SHM_BYTES = 2**30
"""NCCL exchanges data of GPUs on one node through /dev/shm; Docker's default is 64 MiB."""


def check_devices() -> list[Finding]:
    """Check the GPUs that NVIDIA's driver lists, or report the CPUs.

    CPUs are those that this process may use (by taskset or Slurm), RAM is that of the machine.
    """
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        ended = subprocess.run(
            ["nvidia-smi", *query],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
        if gpus := ended.stdout.strip().splitlines():
            return check_gpus(gpus)
    except (OSError, subprocess.SubprocessError):
        pass  # no driver
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
    ram = psutil.virtual_memory().total
    return [ok(f"no GPU; {usable} of {total} CPUs, {_gib(ram)} host memory")]


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


def check_dataset(data: str) -> Iterator[Finding]:
    """Load the manifest of a directory or URL, and compare the sizes of all files with it."""
    directory = dataset_path(data)
    try:
        manifest = load_manifest(directory)
        for split in manifest.splits.values():
            check_sizes(directory, split.shards)
    except TxlError as error:
        text, _, advice = str(error).partition(". ")
        yield problem(
            text,
            expected="a complete dataset, at the same path on every node",
            advice=advice or "check the path, and the mount on this node",
        )
        return
    tokens = sum(split.tokens for split in manifest.splits.values())
    yield ok(
        f"{directory}: {tokens:,} tokens in {counted(len(manifest.shards), 'shard')}",
        same_on_all=[f"{directory}: digest {manifest.digest[:12]}"],
    )


def check_tracking(uri: str | None) -> list[Finding]:
    """Check that an MLflow server answers at `uri`, the value of MLFLOW_TRACKING_URI."""
    if not uri:
        return [ok("no server is set: runs are tracked in mlflow.db next to their directory")]
    name = shown(uri)
    if not uri.startswith(("http://", "https://")):  # mlflow opens databases for writing
        return [note(f"{name}: not checked", advice="txl doctor checks servers (http, https)")]
    from txl_dist.tracking.mlflow_tracker import require_server
    from txl_dist.tracking.tracker import UnavailableError

    try:
        require_server(uri)
    except UnavailableError as error:
        return [
            problem(
                f"{name} does not work: {error}",
                expected="the answers of an MLflow server",
                advice="check its address, that it runs, and the firewall between; for 401 and 403 "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN), and its "
                "option --allowed-hosts. Training goes on without it and sends the metrics later",
            )
        ]
    return [ok(f"{name}: an MLflow server")]


# --- the run directory ----------------------------------------------------------------------------

PROBE_PREFIX = ".txl-doctor-"
PROBE_BYTES = 2**20


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest parent that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def check_run_directory(run: str, *, min_free_bytes: int) -> list[Finding]:
    """Write, sync, read, rename and lock a file in `run` (or where it will be created)."""
    directory = existing_parent(Path(run))
    name = f"{directory}" if directory == Path(run) else f"{directory} (for {run})"
    findings = list(_use(directory, name))
    kind, options = mount_of(directory)
    # NFS clients remember for up to a minute that a file does not exist (nfs(5), lookupcache).
    if kind.startswith("nfs") and not {"lookupcache=positive", "lookupcache=pos"} & options:
        findings.append(
            note(
                f"{name}: NFS, mounted without lookupcache=positive",
                expected="other hosts see stop requests and parts of checkpoints within seconds",
                advice="mount with lookupcache=positive,acdirmin=1,acdirmax=5",
            )
        )
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
    try:
        write_file(path, b"older")
        write_file(path, data)  # a rename over an existing file, as LATEST is updated
        if path.read_bytes() != data:
            yield problem(
                f"{name}: a file has other content than was written",
                expected="the same content",
                advice="do not use this file system; check its disk or server",
            )
        with path.open("rb+") as file:
            if not try_lock(file.fileno(), if_unsupported=False):
                yield note(f"{name}: flock is not supported", expected=LOCKS, advice=MOUNT_LOCKS)
    except OSError as error:
        yield problem(
            f"{name}: a file cannot be written, read back and locked: {error.strerror or error}",
            expected="a directory that every node can write",
            advice="free space or inodes, or choose another run directory"
            if error.errno in DISK_FULL
            else "check the mount, its permissions and the user of the Ray node",
        )
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


LOCKS = "locks that are valid on all nodes, which refuse a second run in the same directory"
MOUNT_LOCKS = (
    "mount with locks (NFS: without nolock or local_lock; Lustre: flock), or make sure that no "
    "directory is used by two runs"
)


def mount_of(directory: Path) -> tuple[str, set[str]]:
    """Return the type and the options of the file system of a directory."""
    resolved = directory.resolve()
    mounts = psutil.disk_partitions(all=True)
    mount = max(  # the last one, if several are mounted at one place
        (len(Path(each.mountpoint).parts), number, each)
        for number, each in enumerate(mounts)
        if resolved.is_relative_to(each.mountpoint)
    )[2]
    return mount.fstype, set(mount.opts.split(","))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
