"""What `txl doctor` checks, and the checks of one node."""

import socket
from dataclasses import dataclass, field
from functools import partial

from txl_dist.doctor.dataset import check_dataset
from txl_dist.doctor.devices import check_devices
from txl_dist.doctor.exposure import DASHBOARD_PORT, check_exposure
from txl_dist.doctor.finding import Finding
from txl_dist.doctor.run import Check, run_checks
from txl_dist.doctor.storage import check_run_directory
from txl_dist.doctor.tracking import check_tracking
from txl_dist.doctor.versions import check_versions, pinned_versions

CHECKS = (
    "versions", "devices", "storage", "dataset", "tracking", "exposure",
    "clock", "network",
)  # fmt: skip
"""Names of all checks; the last two compare the nodes of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What to check. Frozen: every node of a cluster gets a copy."""

    run: str | None = None
    """Absolute path of a run directory, which exists or will be created; None: not checked."""
    data: str | None = None
    """Absolute path or URL of a dataset; None: not checked."""
    tracking_uri: str | None = None
    """MLflow server or database; None: MLFLOW_TRACKING_URI."""
    min_free_bytes: int = 0
    """Free space that the run directory needs."""
    limit_seconds: float = 30.0
    """Time limit of every check."""
    skip: frozenset[str] = field(default_factory=frozenset)
    """Names of checks to leave out."""
    expected_versions: tuple[tuple[str, str], ...] = ()
    """Name and version; (): those of constraints.txt."""
    versions_of: str = "constraints.txt"
    """Where `expected_versions` come from."""
    dashboard_ports: tuple[int, ...] = (DASHBOARD_PORT,)
    """Ports to check for open dashboards."""


def node_checks(request: DoctorRequest) -> dict[str, Check]:
    """Name -> check, of the node that calls it."""
    expected = dict(request.expected_versions) or pinned_versions()
    checks: dict[str, Check] = {
        "versions": partial(check_versions, expected, source=request.versions_of),
        "devices": check_devices,
        "tracking": partial(check_tracking, request.tracking_uri),
        "exposure": partial(check_exposure, request.dashboard_ports),
    }
    if request.run is not None:
        checks["storage"] = partial(
            check_run_directory, request.run, min_free_bytes=request.min_free_bytes
        )
    if request.data is not None:
        checks["dataset"] = partial(check_dataset, request.data)
    return {name: check for name, check in checks.items() if name not in request.skip}


def check_this_machine(request: DoctorRequest, *, node: str | None = None) -> list[Finding]:
    """All checks of one node, in this process. `node` None: the name of this host."""
    return run_checks(
        node_checks(request),
        node=node or socket.gethostname(),
        limit_seconds=request.limit_seconds,
    )
