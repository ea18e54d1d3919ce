"""`txl doctor`, the checks of one node: versions, devices, network, exposure, tracking, storage.

    DoctorRequest -> check_this_machine -> run_checks (threads, time limit) -> Findings -> report

Each check yields findings, or raises an error, which becomes a problem (`run_checks`). A file
system or a server that does not respond can block a thread without limit, so each check has a
daemon thread, which is abandoned after the limit and does not keep the process alive. On a cluster,
cluster/nodes.py runs the checks on every node, and compares them.
"""

import contextlib
import http.client
import json
import os
import platform
import re
import shutil
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from data_pipeline.errors import counted, printable
from data_pipeline.system.files import try_lock, write_file
from data_pipeline.system.sources import shown
from txl_dist.config.redaction import redact
from txl_dist.runtime.process import DRIVER_FILES, source_digest, usable_cores

DASHBOARD_PORT = 8265


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `run_checks` sets `check` and `node`."""

    status: Literal["ok", "note", "problem"]
    """A problem makes `txl doctor` fail; a note does not."""
    found: str
    expected: str = ""
    advice: str = ""
    """The next step; "" if nothing needs to be done."""
    check: str = ""
    node: str = ""


Check = Callable[[], Iterable[Finding]]
LIMIT_SECONDS = 30.0


def run_checks(
    checks: Mapping[str, Check], *, node: str, limit_seconds: float = LIMIT_SECONDS
) -> list[Finding]:
    """Return the findings of all checks, in their order, after at most about `limit_seconds`."""
    too_late = failed_check(TimeoutError(f"no result after {limit_seconds:g} s"))
    results = {name: [too_late] for name in checks}

    def run(name: str, check: Check) -> None:
        try:
            results[name] = list(check())
        except Exception as error:  # one broken check must not hide the findings of the others
            results[name] = [failed_check(error)]

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [
        # Texts of servers and of libraries: no control characters, no credentials.
        replace(finding, check=name, node=node, found=printable(redact(finding.found)))
        for name in checks
        for finding in results[name]
    ]


def failed_check(error: Exception) -> Finding:
    """Return the finding for a check that raised an error, or did not end in time."""
    text = str(error).strip().partition("\n")[0]
    return Finding(
        "problem",
        f"{type(error).__name__}: {text}"[:500],
        expected="a check that ends without an error",
        advice="correct what is named there; if nothing responds, check mounts (df, ls), servers "
        "and the network; if the cause is in txl itself, report it",
    )


def num_problems(findings: Sequence[Finding]) -> int:
    return sum(finding.status == "problem" for finding in findings)


def report(findings: Sequence[Finding]) -> str:
    """Return one line per finding, those that several nodes share once, problems last."""
    nodes: dict[Finding, list[str]] = {}
    order = ("ok", "note", "problem")
    for finding in sorted(findings, key=lambda finding: order.index(finding.status)):
        nodes.setdefault(replace(finding, node=""), []).append(finding.node)
    lines = []
    for finding, names in nodes.items():
        line = f"{finding.status:<8} {finding.check:<9} {', '.join(names)}: {finding.found}"
        line += f" | expected: {finding.expected}" if finding.expected else ""
        lines.append(line + (f" | do: {finding.advice}" if finding.advice else ""))
    count = num_problems(findings)
    return "\n".join([*lines, f"{counted(count, 'problem') if count else 'no problems'} found"])


# --- what is checked ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What to check. Frozen: every node of a cluster gets a copy."""

    run: str | None = None
    """Absolute path of a run directory, which exists or will be created; None: not checked."""
    skip: frozenset[str] = field(default_factory=frozenset)
    dashboard_port: int = DASHBOARD_PORT


def check_this_machine(request: DoctorRequest, node: str | None = None) -> list[Finding]:
    """Run all checks of one node, in this process. `node` None: the name of this host."""
    checks: dict[str, Check] = {
        "versions": check_versions,
        "devices": check_devices,
        "network": check_network,
        "tracking": partial(check_tracking, os.environ.get("MLFLOW_TRACKING_URI", "")),
        "exposure": partial(check_exposure, request.dashboard_port),
    }
    if request.run is not None:
        checks["storage"] = partial(check_run_directory, request.run)
    wanted = {name: check for name, check in checks.items() if name not in request.skip}
    return run_checks(wanted, node=node or socket.gethostname())


# --- versions, devices, network -------------------------------------------------------------------

LIBRARIES = ("torch", "deepspeed", "ray", "mlflow", "webdataset", "numpy")
SAME_SOURCES = (
    "install the same sources of txl-dist and its libraries on every node (make setup, or pip "
    "install --constraint constraints.txt), and start its Ray again"
)
MIN_SHM_BYTES = 2**30
"""NCCL exchanges data of GPUs on one node through /dev/shm; Docker's default is 64 MiB."""


def installed_versions() -> dict[str, str]:
    """Name -> version, of Python, LIBRARIES and our code."""
    versions = {"python": platform.python_version()}
    for name in (*LIBRARIES, "txl-dist"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    versions["txl-dist"] += f" (sources {source_digest()[:12]})"
    return versions


def pinned_versions() -> dict[str, str]:
    """Return the versions of LIBRARIES in `constraints.txt`, which a wheel has in the package."""
    package = Path(__file__).parents[1]
    is_wheel = (package / "constraints.txt").is_file()
    path = (package if is_wheel else package.parent) / "constraints.txt"
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;#]+)", path.read_text("utf-8")))
    return {name: pins[name] for name in LIBRARIES}


def without_builds(versions: str) -> str:
    """Return `versions` without what follows `+`: 2.13.0+cpu and 2.13.0+cu130 are equal."""
    return re.sub(r"\+\w+", "", versions)


def check_versions() -> Iterator[Finding]:
    installed = installed_versions()
    yield Finding("ok", ", ".join(f"{name} {found}" for name, found in installed.items()))
    for name, pin in pinned_versions().items():
        if without_builds(installed[name]) != without_builds(pin):
            expected = f"{name} {pin} (constraints.txt)"
            yield Finding("problem", f"{name} {installed[name]}", expected, SAME_SOURCES)


def check_devices() -> list[Finding]:
    """Check the GPUs of this machine, or report the CPUs.

    With CUDA_VISIBLE_DEVICES= a run uses the CPUs: those that taskset or Slurm leave this process.
    """
    has_driver = any(Path(name).exists() for name in DRIVER_FILES)
    if has_driver and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return [*check_gpus()]
    usable, ram = usable_cores(), _gib(psutil.virtual_memory().total)
    return [Finding("ok", f"no GPU is visible; {usable} CPUs, {ram} host memory")]


def check_gpus() -> Iterator[Finding]:
    """Check that torch and triton can use the GPUs of the driver, and that NCCL has memory."""
    import torch

    from txl_dist.model.devices import triton_unavailable_reason

    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield Finding(
            "problem",
            f"{build} finds no usable GPU, although there is a driver",
            expected="a build of torch for CUDA, and torch.cuda.is_available()",
            advice="install torch from the index for CUDA (https://pytorch.org), or a newer driver "
            "(see nvidia-smi), or hide the GPUs: CUDA_VISIBLE_DEVICES=",
        )
    elif reason := triton_unavailable_reason(torch.device("cuda")):
        yield Finding(
            "problem",
            f"{build}: GPUs need triton, and {reason}",
            expected="the package triton, a C compiler, and compute capability 8.0 or newer",
            advice="mend that, or use the CPUs: CUDA_VISIBLE_DEVICES= before the command",
        )
    else:
        count = counted(torch.cuda.device_count(), "GPU")
        yield Finding("ok", f"{count} ({torch.cuda.get_device_name()}), {build}")
    shared = shutil.disk_usage("/dev/shm").total
    if shared < MIN_SHM_BYTES:
        yield Finding(
            "note",
            f"/dev/shm has {_gib(shared)}",
            expected=f"{_gib(MIN_SHM_BYTES)} or more for NCCL",
            advice="docker run --shm-size=8g; on Kubernetes mount an emptyDir of medium Memory",
        )


def check_network() -> Iterator[Finding]:
    """Check the address of this host's name: without a named interface, gloo listens there.

    No connection is opened.
    """
    name, address = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    if address in own and not address.startswith("127."):
        yield Finding("ok", f"{name} is {address}, an address of this machine")
    else:
        yield Finding(
            "note",
            f"{name} is {address or 'unknown'}, which other hosts do not reach",
            expected="an address of this machine, if ranks on other hosts connect to it",
            advice="on one machine and with Ray nothing; with torchrun on several, set "
            "GLOO_SOCKET_IFNAME to the interface between them",
        )


# --- exposure: who can use Ray --------------------------------------------------------------------


def check_exposure(port: int = DASHBOARD_PORT) -> Iterator[Finding]:
    """Check the dashboard at `port` of this machine, and who can read Ray's token.

    The dashboard's port also serves the Jobs API, which runs any command as the user of Ray. So it
    must require a token, and listen on the loopback interface only: tokens travel unencrypted. A
    Ray whose dashboard requires no token requires none anywhere.
    """
    addresses = sorted(
        {
            connection.laddr.ip
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        }
    )
    where = f"port {port} on {', '.join(addresses)}"
    answers = {_is_open(address, port) for address in addresses}
    loopback = ("127.", "::1", "::ffff:127.")
    if not addresses:
        yield Finding("ok", f"nothing listens on port {port} (Ray dashboard, Jobs API)")
    elif answers == {None}:
        yield Finding("note", f"{where}: another program than Ray, or no answer")
    elif True in answers:
        yield Finding(
            "problem",
            f"{where}: the Ray dashboard and the Jobs API answer without a token, so everyone who "
            "reaches the port can run commands",
            expected="401 without a token",
            advice="stop that Ray (ray stop), create a token (ray get-auth-token --generate), and "
            "start it again: RAY_AUTH_MODE=token ray start --dashboard-host=127.0.0.1 ...",
        )
    elif not all(address.startswith(loopback) for address in addresses):
        yield Finding(
            "problem",
            f"{where}: the Ray dashboard and the Jobs API listen on other interfaces",
            expected="127.0.0.1 only: the token travels unencrypted",
            advice="ray start --dashboard-host=127.0.0.1, and reach it by ssh -L or kubectl "
            "port-forward; where a network policy protects the port: --skip exposure",
        )
    else:
        yield Finding("ok", f"{where}: requires a token, on the loopback interface only")
    yield from check_token_file()


def _is_open(address: str, port: int) -> bool | None:
    """Whether Ray answers at an address of this machine without a token; None: no Ray."""
    host = "127.0.0.1" if address in ("0.0.0.0", "::") else address.removeprefix("::ffff:")
    connection = http.client.HTTPConnection(host, port, timeout=3)
    try:
        connection.request("GET", "/api/version")  # not through a proxy, as urllib would
        response = connection.getresponse()
        if response.status in (401, 403):
            return False
        return True if "ray_version" in json.loads(response.read(4096)) else None
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()


def check_token_file() -> Iterator[Finding]:
    """Yield a problem if other users can read Ray's token."""
    home = Path(os.environ.get("HOME", "/"))
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        yield Finding(
            "problem",
            f"{path}, the token of Ray, has mode {mode:o}: other users of this machine can read it",
            expected="mode 600",
            advice=f"chmod 600 {path}; to create one: umask 077 && ray get-auth-token --generate",
        )


# --- tracking, storage ----------------------------------------------------------------------------


def check_tracking(uri: str) -> Iterator[Finding]:
    """Check that an MLflow server answers at `uri`, the value of MLFLOW_TRACKING_URI."""
    if not uri.startswith(("http://", "https://")):  # mlflow opens databases for writing
        yield Finding("ok", "no server is set (MLFLOW_TRACKING_URI); databases are not checked")
        return
    from txl_dist.tracking.mlflow_tracker import require_server
    from txl_dist.tracking.tracker import UnavailableError

    try:
        require_server(uri)
        yield Finding("ok", f"{shown(uri)}: an MLflow server")
    except UnavailableError as error:
        yield Finding(
            "problem",
            f"{shown(uri)} does not work: {error}",
            expected="the answers of an MLflow server",
            advice="check its address, that it runs, and the firewall between; for 401 and 403 "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN), and its option "
            "--allowed-hosts. Training goes on without it and sends the metrics later",
        )


FEW_BYTES = 10 * 2**30
"""Free space below which a run directory is noted."""
LOCKS = "locks that are valid on all nodes, which refuse a second run in the same directory"
MOUNT_LOCKS = (
    "mount with locks (NFS: without nolock or local_lock; Lustre: flock), or make sure that no "
    "directory is used by two runs"
)


def new_probe(run: str) -> Path:
    """Return the path of a new file in `run`, or in its nearest parent that exists."""
    directory = next(parent for parent in (Path(run), *Path(run).parents) if parent.exists())
    return directory / f".txl-doctor-{uuid.uuid4().hex}.tmp"


def check_run_directory(run: str) -> Iterator[Finding]:
    """Write, sync, rename and lock a file, as checkpoints and LATEST are; the file is removed."""
    path = new_probe(run)
    try:
        write_file(path, b"older")
        write_file(path, os.urandom(2**20))
        with path.open("rb+") as file:
            if not try_lock(file.fileno(), if_unsupported=False):
                yield Finding("note", f"{path.parent}: flock is not supported", LOCKS, MOUNT_LOCKS)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    free_bytes = shutil.disk_usage(path.parent).free
    done = f"{path.parent}: write, sync and rename work; {_gib(free_bytes)} free"
    if free_bytes < FEW_BYTES:
        yield Finding("note", done, "room for checkpoints: txl estimate says their size")
    else:
        yield Finding("ok", done)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
