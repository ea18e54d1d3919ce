"""RayJobs: the client of a cluster's Ray Jobs API (for `txl job`).

    txl job submit -> RayJobs.submit -> dashboard on the head node -> JobSupervisor (an actor)
                   -> shell -> cluster/job_driver.py -> txl train --on auto

Ray's stop request is SIGTERM to the driver and all its child processes, and SIGKILL after
RAY_JOB_STOP_WAIT_TIME_S, 3 seconds by default. The supervisor reads that variable in its own
environment, which is the job's: so every job sets it to the time that its command may take to end.

Ray packs what is sent: the working directory, without excluded files, and the packages of this
project as this process imports them (`py_modules`), with the metadata that make them look
installed. So the cluster runs the code that submitted the job. Equal files are uploaded only once.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray._private.runtime_env import packaging
from ray.job_submission import JobStatus, JobSubmissionClient, JobType

from cluster.connection import check_cluster, lines_of
from data_pipeline.system.sources import shown
from txl_dist.cli.job_request import EXIT_LINE, Job, JobExistsError, JobRequest, JobState
from txl_dist.config.redaction import redact
from txl_dist.errors import ConfigError, PreemptedError, TxlError
from txl_dist.runtime.process import PACKAGES

REQUEST_SECONDS = 60.0
"""Time limit for a response of the API; Ray's client has none."""
POLL_SECONDS = 2.0
HEAD_SECONDS = 30.0
"""How long the API may be unreachable while a job is followed."""
NUM_LAST_LINES = 40
"""Lines that are kept of the output of a failed job."""
DEFAULT_EXCLUDES = (
    *(".git", ".hg", ".svn", ".venv", "venv", "node_modules", "*.egg-info"),
    *(".*_cache", ".hypothesis", ".ipynb_checkpoints", ".DS_Store", "*.tmp", "/build", "/dist"),
    *("/data", "/runs", "mlruns", "mlflow.db*", "*.tar.zst", "*.safetensors"),
)
CODE_EXCLUDES = ("__pycache__", "*.pyc")
SECRET_FILES = (
    *(".env", ".env.*", ".netrc", ".aws", ".ssh", ".kube", ".config", "*.pem", "*.key", "*.p12"),
    *("id_rsa*", "id_ed25519*", "auth_token", "*password*", "*secret*"),
    *("credentials", "credentials.json", ".git-credentials"),
)
"""Files that usually contain passwords, tokens or keys."""
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_LOGGERS = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")
"""The last two set a level of their own, and report every connection."""
_STATES: dict[JobStatus, JobState] = {
    JobStatus.PENDING: "pending",
    JobStatus.RUNNING: "running",
    JobStatus.STOPPED: "stopped",
    JobStatus.SUCCEEDED: "done",
    JobStatus.FAILED: "failed",
}


class RayJobs:
    """The txl jobs of one cluster. Methods raise TxlError if the cluster does not respond."""

    def __init__(self, address: str | None) -> None:
        """Connect to the URL of a dashboard, the address of a head, or None (automatic). Raises
        ConfigError if nothing responds or the token is missing or wrong.
        """
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        address = address or next(filter(None, map(os.environ.get, _ADDRESS_VARIABLES)), "auto")
        with _without_address_variables():
            url = _api_url(address)
            self.url = shown(url)
            """Without credentials."""
            with self._explained("it cannot be used", unreachable=ConfigError):
                self._client = _Client(url)

    @property
    def needs_token(self) -> bool:
        """Whether the API refuses requests without a token."""
        with self._explained("it does not tell whether it requires a token"):
            response = self._client._do_request("GET", "/api/authentication_mode")
            return response.status_code != 200 or (
                response.json().get("authentication_mode") != "disabled"
            )

    @staticmethod
    def package(request: JobRequest) -> dict[str, int]:
        """Name -> bytes of the files that `submit` would send. Contacts no cluster."""
        root = request.working_dir.resolve()
        with TemporaryDirectory() as folder:
            sizes = _sizes(root, _excludes(request))
            for module in _code(Path(folder)):
                own = _sizes(module, CODE_EXCLUDES)
                sizes |= {f"{module.name}/{name}": size for name, size in own.items()}
        if request.config is not None and request.config not in sizes:
            raise ConfigError(
                f"{root / request.config} would not be sent: a pattern of .gitignore, .rayignore "
                "or --exclude matches it. Move the config, or change the pattern"
            )
        return sizes

    def submit(self, request: JobRequest, job_id: str) -> None:
        """Upload the files, unless they are there, and start the job. Raises JobExistsError."""
        environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(request.stop_seconds), **request.environment}
        with (
            TemporaryDirectory() as folder,
            self._explained(f"job {job_id} could not be submitted"),
        ):
            self._client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=job_id,
                runtime_env={
                    "working_dir": str(request.working_dir.resolve()),
                    "excludes": _excludes(request),
                    "py_modules": [str(module) for module in _code(Path(folder))],
                    "env_vars": environment,
                },
                metadata={"txl.command": request.command},
            )

    def jobs(self) -> list[Job]:
        """All txl jobs that the cluster knows, oldest first."""
        with self._explained("its jobs cannot be listed"):
            details = self._client.list_jobs()
        jobs = map(_job_of, filter(_is_txl_job, details))
        return sorted(jobs, key=lambda job: job.start_seconds or 0)

    def job(self, job_id: str) -> Job:
        """Raises ConfigError if there is no such job."""
        with self._explained(f"job {job_id} cannot be found"):
            details = self._client.get_job_info(job_id)
        logs = ""
        if details.status in (JobStatus.FAILED, JobStatus.STOPPED):
            with suppress(TxlError):  # the node of the driver is gone, with its log
                logs = self.logs(job_id)
        return _job_of(details, logs)

    def logs(self, job_id: str) -> str:
        """All output of the driver."""
        with self._explained(f"the output of job {job_id} cannot be read"):
            return str(self._client.get_job_logs(job_id))

    def wait(self, job_id: str, write: Callable[[str], object] = lambda text: None) -> Job:
        """Return when the job has ended. `write` is called with all output, old and new."""
        # Not Ray's `tail_job_logs`: it has no time limit, and starts again from the beginning.
        num_written, last_response = 0, time.monotonic()
        while True:
            try:
                job = self.job(job_id)  # before its output, which then is complete
            except ConfigError:
                raise
            except TxlError as error:
                if time.monotonic() - last_response > HEAD_SECONDS:
                    raise TxlError(
                        f"{error}. If the head node has failed, its jobs have ended; start the "
                        "cluster again and submit the same command: it resumes"
                    ) from None
                time.sleep(POLL_SECONDS)
                continue
            last_response = time.monotonic()
            with suppress(TxlError):  # the node of the driver is gone, with its log
                text = self.logs(job_id)
                write(text[num_written:])
                num_written = max(num_written, len(text))
            if job.is_ended:
                if num_written == 0:  # the driver has not run
                    write(f"{job.message}\n")
                return job
            time.sleep(POLL_SECONDS)

    def stop(self, job_id: str) -> bool:
        """Ask a job to stop; False if it has already ended."""
        with self._explained(f"job {job_id} could not be stopped"):
            return bool(self._client.stop_job(job_id))

    @contextmanager
    def _explained(self, failure: str, *, unreachable: type[TxlError] = TxlError) -> Iterator[None]:
        """Turn errors of Ray's client and of the network into a TxlError."""
        try:
            yield
        except ray.exceptions.AuthenticationError:
            raise ConfigError(
                f"the Ray cluster at {self.url} refuses the token of this machine, or there is "
                "none. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token "
                "of the cluster (default ~/.ray/auth_token; ray get-auth-token prints it there)"
            ) from None
        except OSError as error:  # also those of the package requests
            raise unreachable(
                f"no Ray cluster responds at {self.url}: {_line(error, 0)}. Check that it runs "
                "with its dashboard, the port (default 8265), and the network or port-forward"
            ) from None
        except (RuntimeError, ValueError) as error:
            if "status code 404" in str(error):
                raise ConfigError(
                    f"{self.url}: {failure}: it knows no such job. After a restart of the head "
                    "its jobs are unknown; submit the same command: a run resumes"
                ) from None
            if "already exists" in str(error):
                raise JobExistsError(f"{self.url}: {failure}: it exists already") from None
            # The server sends its whole traceback, which ends with the reason.
            raise TxlError(f"{self.url}: {failure}: {_line(error, -1)}") from None


def _code(folder: Path) -> list[Path]:
    """The packages of this project, and metadata with which they look installed."""
    installed = distribution("txl-dist")
    metadata = folder / f"txl_dist-{installed.version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: txl-dist\nVersion: {installed.version}\n"
    )
    specs = [find_spec(package) for package in PACKAGES]
    locations = [spec.submodule_search_locations for spec in specs if spec]
    return [*(Path(found[0]) for found in locations if found), metadata]


def _excludes(request: JobRequest) -> list[str]:
    """What Ray leaves out, besides the patterns of .gitignore and .rayignore.

    Also links that lead out of the directory, whose target Ray would pack, and links to
    directories, which can form cycles.
    """
    root = request.working_dir.resolve()
    excludes = [*DEFAULT_EXCLUDES, *SECRET_FILES, *CODE_EXCLUDES, *request.excludes]
    skip = packaging._get_excludes(root, excludes)
    for directory, names, files in os.walk(root):
        for path in [Path(directory) / name for name in (*names, *files)]:
            stays = path.is_file() and path.resolve().is_relative_to(root)
            if path.is_symlink() and not stays:
                excludes.append(f"/{path.relative_to(root).as_posix()}")
        names[:] = [name for name in names if not skip(Path(directory) / name)]
    return excludes


def _sizes(root: Path, excludes: Sequence[str]) -> dict[str, int]:
    """Name -> bytes of the files that Ray packs of a directory."""
    sizes: dict[str, int] = {}

    def add(path: Path) -> None:
        if path.is_file():
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{path} cannot be read; leave it out: --exclude {path.name}")
            sizes[path.relative_to(root).as_posix()] = path.stat().st_size

    # Not public, but what Ray does: otherwise the size would be that of other files.
    skip = packaging._get_excludes(root, list(excludes))
    packaging._dir_travel(root, [skip], add, include_gitignore=True)
    return sizes


class _Client(JobSubmissionClient):
    """Ray's client, with a time limit for every request."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=REQUEST_SECONDS, **options)


@contextmanager
def _without_address_variables() -> Iterator[None]:
    """Ray prefers the environment to an explicit address."""
    variables = {name: os.environ.pop(name) for name in _ADDRESS_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(variables)


def _api_url(address: str) -> str:
    """The URL of the Jobs API. Raises ConfigError within seconds if no cluster responds."""
    if address.startswith(("http://", "https://")):
        return address
    if "://" in address:
        raise ConfigError(
            f"--address {shown(address)}: give the URL of the dashboard, http://HOST:8265, or the "
            "address of the head, HOST:6379"
        )
    from ray.dashboard.utils import ray_address_to_api_server_url

    check_cluster(address, option="--address")
    try:
        return str(ray_address_to_api_server_url(address))
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"the Ray cluster at --address {address} has no Jobs API: {_line(error, 0)}. Start "
            "its head with the dashboard (ray start --head --include-dashboard=true)"
        ) from None


def _is_txl_job(details: Any) -> bool:
    return details.type == JobType.SUBMISSION and "txl.command" in (details.metadata or {})


def _job_of(details: Any, logs: str = "") -> Job:
    state = _STATES[details.status]
    code = details.driver_exit_code
    if details.status == JobStatus.STOPPED and logs:
        code = _recorded_code(logs, default=PreemptedError.exit_code)
    if code == PreemptedError.exit_code:
        state = "stopped"
    if state == "done":
        code = 0
    elif state == "failed" and code not in (1, 2, 3, 4, 5):
        code = 1  # killed, not started, or a shell's code for a missing command
    message = details.message or ""
    if state == "failed" and logs:
        message = "\n".join([*message.splitlines()[:1], *logs.splitlines()[-NUM_LAST_LINES:]])
    return Job(
        id=details.submission_id,
        state=state,
        exit_code=code,
        message=message,
        command=(details.metadata or {}).get("txl.command", details.entrypoint),
        start_seconds=details.start_time and details.start_time / 1000,
        end_seconds=details.end_time and details.end_time / 1000,
    )


def _recorded_code(logs: str, *, default: int) -> int:
    """The code in the last line of the driver. Ray records none for a stopped job."""
    match = re.search(rf"^{re.escape(EXIT_LINE)}(\d+)\s*\Z", logs, re.MULTILINE)
    return int(match[1]) if match else default


def _line(error: Exception, number: int) -> str:
    """A line of an error, without the password that the address may have."""
    return redact(lines_of(error)[number]).rstrip(".")
