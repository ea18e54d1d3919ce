"""Jobs: txl commands on a Ray cluster, by Ray's Jobs API (for `txl job`).

    words after `--` -> plan_job -> JobRequest -> RayJobs.submit -> dashboard on the head node
                     -> JobSupervisor (an actor) -> shell -> cluster/job_driver.py -> txl --on auto

The words are parsed by the command itself, so a wrong option is refused here, with its message. So
is an invalid config, and everything that looks like a secret: the command and the environment of a
job are readable by anyone with access to the cluster's dashboard.

A job has a name that depends only on what it writes, and a number per attempt: NAME-1, NAME-2, ...
So two submissions of the same run have the same name, and the second one finds the first.

Ray packs what is sent: the working directory, without excluded files, and the packages of this
project as this process imports them (`py_modules`), with the metadata that make them look
installed. So the cluster runs the code that submitted the job. Equal files are uploaded only once.

Ray's stop request is SIGTERM to the driver and all its child processes, and SIGKILL after
RAY_JOB_STOP_WAIT_TIME_S, 3 seconds by default. The supervisor reads that variable in its own
environment, which is the job's: so every job sets it to the time that its command may take to end.
"""

import hashlib
import logging
import math
import os
import posixpath
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray._private.runtime_env import packaging
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType

from cluster.connection import check_cluster, lines_of
from cluster.job_driver import COMMANDS, EXIT_LINE
from data_pipeline.system.progress import clock
from data_pipeline.system.sources import shown
from txl_dist.cli.options import paths_of_another_machine
from txl_dist.config.config_file import flatten_config, load_run_config
from txl_dist.config.named_configs import find_config, is_sent_with_the_code
from txl_dist.config.redaction import HIDDEN, redact, redact_field
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError, PreemptedError, TxlError
from txl_dist.runtime.process import PACKAGES

MAX_BYTES = 100 * 2**20
"""Ray's limit for an upload to its Jobs API (`DASHBOARD_CLIENT_MAX_SIZE` of Ray 2.60)."""
SHUTDOWN_SECONDS = 30
"""Beyond `training.grace_seconds`, for the end of the ranks and of the driver."""
STOP_SECONDS = 60
"""How long `prepare` and `eval` may take to end; they keep no unfinished unit of work."""
REQUEST_SECONDS = 60.0
"""Time limit for a response of the API; Ray's client has none."""
POLL_SECONDS = 2.0
HEAD_SECONDS = 30.0
"""How long the API may be unreachable while a job is followed."""
NUM_LAST_LINES = 40
"""Lines that are kept of the output of a failed job."""
EXCLUDES = (
    *(".git", ".hg", ".svn", ".venv", "venv", "node_modules", "*.egg-info"),
    *(".*_cache", ".hypothesis", ".ipynb_checkpoints", ".DS_Store", "*.tmp", "/build", "/dist"),
    *("/data", "/runs", "mlruns", "mlflow.db*", "*.tar.zst", "*.safetensors"),
    *("__pycache__", "*.pyc"),
    # Files that usually contain passwords, tokens or keys.
    *(".env", ".env.*", ".netrc", ".aws", ".ssh", ".kube", ".config", "*.pem", "*.key", "*.p12"),
    *("id_rsa*", "id_ed25519*", "auth_token", "*password*", "*secret*"),
    *("credentials", "credentials.json", ".git-credentials"),
)
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_LOGGERS = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")
"""The last two set a level of their own, and report every connection."""
_SECRETS_BELONG = (
    "Anyone with access to the cluster's dashboard could read it. Set secrets in the environment "
    "of the nodes, where `ray start` runs (for MLflow: MLFLOW_TRACKING_USERNAME, "
    "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN)"
)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A txl command to run on a cluster."""

    name: str
    """Identifies the run; the id of an attempt is this with a number."""
    words: tuple[str, ...]
    """The command without `txl`. The path of a run config is relative to the package; it can be a
    name of a config that the sent code brings."""
    root: str
    """Absolute path on the cluster, seen by all nodes; all other relative paths begin there."""
    stop_seconds: int = STOP_SECONDS
    """How long the command may take to end after a stop request; then Ray kills it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the command and of all its workers."""
    python: str = "python"
    """The Python interpreter on the cluster."""
    working_dir: Path = Path()
    """Its files are sent to the cluster, with the code of this project."""
    excludes: tuple[str, ...] = ()
    """Patterns of files that are not sent, as in .gitignore, relative to `working_dir`."""

    @property
    def command(self) -> str:
        """`txl ...`, for people and to compare requests."""
        return shlex.join(("txl", *self.words))

    @property
    def entrypoint(self) -> str:
        """The shell command that Ray runs in the unpacked package."""
        words = (self.python, "-P", "-m", "cluster.job_driver", "--root", self.root)
        # exec: otherwise a shell stays between Ray and the driver, and dies of the stop signal.
        return f"exec {shlex.join((*words, '--', *self.words))}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt, as the cluster knows it."""

    id: str
    state: str
    """pending, running, done, stopped or failed."""
    exit_code: int | None
    """Exit code of the txl command; None while it runs; 1 if unknown, as after a lost node."""
    message: str
    """Why a failed job failed, with the last lines of its log."""
    command: str
    """`txl ...`, as it runs on the cluster."""
    start_seconds: float | None
    """Unix time."""
    end_seconds: float | None
    """Unix time; None while it runs."""

    @property
    def is_ended(self) -> bool:
        return self.state in ("done", "stopped", "failed")

    @property
    def number(self) -> int:
        """Number of the attempt."""
        return int(self.id.rpartition("-")[2])

    @property
    def duration(self) -> str:
        now = time.time()
        return clock((self.end_seconds or now) - (self.start_seconds or now))


# --- from words to a request ----------------------------------------------------------------------


def plan_job(
    words: Sequence[str],
    *,
    program: Any,
    root: str,
    working_dir: Path,
    environment: Sequence[str] = (),
    python: str = "python",
) -> JobRequest:
    """Check a command and turn it into a request. `program` is `txl` as a command of typer.

    `environment` has items NAME=VALUE. Raises ConfigError, or a usage error of typer.
    """
    command = words[0] if words else ""
    if command not in COMMANDS:
        raise ConfigError(
            f"{command or 'nothing'!r} cannot be a job; write txl job submit -- "
            f"{'|'.join(COMMANDS)} ARGS..."
        )
    if not posixpath.isabs(root):
        raise ConfigError(f"--root {root}: give an absolute path on the cluster")
    _refuse_secrets(words)
    with paths_of_another_machine():
        context = program.commands[command].make_context(f"txl {command}", list(words[1:]))
    if any(re.match(r"--on(=|$)", word) for word in words):
        raise ConfigError("--on is not an option of a job, which runs on the cluster it is sent to")

    def on_cluster(path: str) -> str:
        return posixpath.normpath(posixpath.join(root, path))

    directory, stop_seconds = working_dir.resolve(), STOP_SECONDS
    if command == "train":
        given = Path(context.params["config"])
        path = find_config(given).resolve()
        config = load_run_config(path, context.params["overrides"] or [])
        _refuse_secrets_of(config)
        is_packed = path.is_relative_to(directory)
        if not is_packed and not is_sent_with_the_code(path):
            raise ConfigError(
                f"{path} is not in {directory}, whose files are sent to the cluster; give its "
                "directory with --working-dir"
            )
        stop_seconds = math.ceil(config.training.grace_seconds) + SHUTDOWN_SECONDS
        stem, identity = config.directory, [on_cluster(config.directory)]
        corpora = [corpus.path for corpus in config.data.corpora.values()]
        local_paths = [config.directory, *corpora]
        # The config becomes the first argument, where cluster/job_driver.py expects it.
        position = next(n for n, word in enumerate(words) if n and Path(word) == given)
        others = (word for n, word in enumerate(words) if n not in (0, position))
        config_word = path.relative_to(directory).as_posix() if is_packed else str(given)
        words = ("train", config_word, "--on", "auto", *others)
    else:
        # Preparations are the same job if they write the same dataset, evaluations if the words
        # agree.
        stem = str(context.params.get("out") or "")
        identity = [on_cluster(stem)] if stem else [root, *words[1:]]
        local_paths = [stem]
        words = (command, "--on", "auto", *words[1:])
    # Runs and datasets in the working directory are not sent.
    paths = [(directory / path).resolve() for path in local_paths if path]
    inside = [path for path in paths if path != directory and path.is_relative_to(directory)]
    return JobRequest(
        name=_name(command, posixpath.basename(posixpath.normpath(stem)), identity),
        words=tuple(words),
        root=root,
        stop_seconds=stop_seconds,
        environment=_environment(environment),
        python=python,
        working_dir=working_dir,
        excludes=tuple(f"/{path.relative_to(directory).as_posix()}" for path in inside),
    )


def _name(command: str, stem: str, identity: Sequence[str]) -> str:
    """`txl-train-tiny-0123abcd`: readable, legal in a URL, and different for different runs."""
    digest = hashlib.sha256("\0".join((command, *identity)).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", stem)[:40].strip("-")
    return "-".join(filter(None, ("txl", command, readable, digest)))


def _refuse_secrets(words: Sequence[str]) -> None:
    for word in words:
        # The only option of these commands whose name looks like that of a secret.
        text = word.removeprefix("--text-key=")
        if redact(text) != text:
            raise ConfigError(f"{redact(text)}: a secret in the command. {_SECRETS_BELONG}")


def _refuse_secrets_of(config: RunConfig) -> None:
    for name, value in flatten_config(config).items():
        if HIDDEN in str(value):
            raise ConfigError(
                f"{name}={value}: a secret in the config, which would be uploaded. "
                f"{_SECRETS_BELONG}"
            )


def _environment(settings: Sequence[str]) -> dict[str, str]:
    environment: dict[str, str] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {redact(setting)}: write NAME=VALUE")
        if redact_field(name, value) != value or redact(value) != value:
            raise ConfigError(f"--env {name}={HIDDEN}: a secret. {_SECRETS_BELONG}")
        environment[name] = value
    return environment


# --- the client -----------------------------------------------------------------------------------


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

    def submit(self, request: JobRequest, *, attach: bool = False) -> tuple[Job, bool]:
        """Upload the files, unless they are there, and start the next attempt.

        Returns the job and whether it was running already, which is an error unless `attach` is set
        and the commands are equal.
        """
        attempts = [job for job in self.jobs() if job.id.startswith(f"{request.name}-")]
        running = [job for job in attempts if not job.is_ended]
        if not running:
            job_id = f"{request.name}-{max((job.number for job in attempts), default=0) + 1}"
            self._submit(request, job_id)
            return self.job(job_id), False
        job = running[-1]
        if attach and job.command == request.command:
            return job, True
        difference = "" if job.command == request.command else f" ({job.command})"
        at = f"--address {self.url}"
        raise ConfigError(
            f"this run is already running as job {job.id}{difference}. To watch it: txl job logs "
            f"-f {job.id} {at}. To start it again: txl job stop --wait {job.id} {at}, then submit"
        )

    def _submit(self, request: JobRequest, job_id: str) -> None:
        environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(request.stop_seconds), **request.environment}
        with (
            TemporaryDirectory() as folder,
            self._explained(f"job {job_id} could not be submitted"),
        ):
            self._client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=job_id,  # Ray refuses an id that another client has just submitted
                runtime_env={
                    "working_dir": str(request.working_dir.resolve()),
                    "excludes": excludes_of(request),
                    "py_modules": [str(module) for module in code_packages(Path(folder))],
                    "env_vars": environment,
                },
                metadata={"txl.command": request.command},
            )

    def jobs(self) -> list[Job]:
        """Return all txl jobs that the cluster knows, oldest first."""
        with self._explained("its jobs cannot be listed"):
            details = self._client.list_jobs()
        jobs = [
            job_of(each)
            for each in details
            if each.type == JobType.SUBMISSION and "txl.command" in (each.metadata or {})
        ]
        return sorted(jobs, key=lambda job: job.start_seconds or 0)

    def find(self, name: str) -> Job:
        """Return the newest attempt of a run, or one attempt by its id.

        `name` can lack the digest. Raises ConfigError for no job, and for jobs of several runs.
        """
        pattern = re.compile(re.escape(name) + r"(-[0-9a-f]{8})?(-\d+)?")
        attempts = [job for job in self.jobs() if pattern.fullmatch(job.id)]
        runs = sorted({job.id.rpartition("-")[0] for job in attempts})
        if len(runs) > 1:
            raise ConfigError(f"{name} are several runs: {', '.join(runs)}. Name one of them")
        if not runs:
            raise ConfigError(
                f"{self.url} knows no job {name}: txl job list --address {self.url} shows those "
                "that it knows. After a restart of the head its jobs are unknown; submit the same "
                "command: a run resumes"
            )
        return self.job(max(attempts, key=lambda job: job.number).id)

    def job(self, job_id: str) -> Job:
        """Return a job by its id."""
        with self._explained(f"job {job_id} cannot be found"):
            details = self._client.get_job_info(job_id)
        logs = ""
        if details.status in (JobStatus.FAILED, JobStatus.STOPPED):
            with suppress(TxlError):  # the node of the driver is gone, with its log
                logs = self.logs(job_id)
        return job_of(details, logs)

    def logs(self, job_id: str) -> str:
        """Return all output of the driver."""
        with self._explained(f"the output of job {job_id} cannot be read"):
            return str(self._client.get_job_logs(job_id))

    def wait(self, job_id: str, write: Callable[[str], object] = lambda text: None) -> Job:
        """Return when the job has ended. `write` is called with all output, old and new."""
        # Not Ray's `tail_job_logs`: it has no time limit, and starts again from the beginning.
        num_written, last_response = 0, time.monotonic()
        while True:
            try:
                job = self.job(job_id)  # before its output, which then is complete
                last_response = time.monotonic()
                with suppress(TxlError):  # the node of the driver is gone, with its log
                    text = self.logs(job_id)
                    write(text[num_written:])
                    num_written = max(num_written, len(text))
                if job.is_ended:
                    if num_written == 0:  # the driver has not run
                        write(f"{job.message}\n")
                    return job
            except ConfigError:
                raise
            except TxlError as error:
                if time.monotonic() - last_response > HEAD_SECONDS:
                    raise TxlError(
                        f"{error}. If the head node has failed, its jobs have ended; start the "
                        "cluster again and submit the same command: it resumes"
                    ) from None
            time.sleep(POLL_SECONDS)

    def stop(self, job_id: str) -> bool:
        """Ask a job to stop; return False if it has already ended."""
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
        except PermissionError as error:
            raise ConfigError(
                f"{error.filename} cannot be read; leave it out with a line in .rayignore"
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
            # The server sends its whole traceback, which ends with the reason.
            raise TxlError(f"{self.url}: {failure}: {_line(error, -1)}") from None


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
    """Return the URL of the Jobs API. Raises ConfigError within seconds without a cluster."""
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


def job_of(details: JobDetails, logs: str = "") -> Job:
    """Return a job as Ray describes it, with the output of its driver if it has ended."""
    status, code = details.status, details.driver_exit_code
    if status == JobStatus.STOPPED and logs:  # Ray records no code of a stopped job
        match = re.search(rf"^{re.escape(EXIT_LINE)}(\d+)\s*\Z", logs, re.MULTILINE)
        code = int(match[1]) if match else PreemptedError.exit_code
    state = "done" if status == JobStatus.SUCCEEDED else status.value.lower()
    message = details.message or ""
    if state == "done":
        code = 0
    elif code == PreemptedError.exit_code:
        state = "stopped"
    elif state == "failed":
        # Otherwise: killed, not started, or a shell's code for a missing command.
        code = code if code in (1, 2, 3, 4, 5) else 1
        if logs:
            lines = [*message.splitlines()[:1], *logs.splitlines()[-NUM_LAST_LINES:]]
            message = "\n".join(lines)
    return Job(
        id=details.submission_id or "",
        state=state,
        exit_code=code,
        message=message,
        command=(details.metadata or {}).get("txl.command", details.entrypoint),
        start_seconds=details.start_time and details.start_time / 1000,
        end_seconds=details.end_time and details.end_time / 1000,
    )


def _line(error: Exception, number: int) -> str:
    """Return a line of an error, without the password that the address may have."""
    return redact(lines_of(error)[number]).rstrip(".")


# --- what is sent ---------------------------------------------------------------------------------


def code_packages(folder: Path) -> list[Path]:
    """Return the packages of this project, and metadata with which they look installed."""
    installed = distribution("txl-dist")
    metadata = folder / f"txl_dist-{installed.version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: txl-dist\nVersion: {installed.version}\n"
    )
    specs = [find_spec(package) for package in PACKAGES]
    locations = [spec.submodule_search_locations for spec in specs if spec]
    return [*(Path(found[0]) for found in locations if found), metadata]


def excludes_of(request: JobRequest) -> list[str]:
    """Return what Ray leaves out, besides the patterns of .gitignore and .rayignore.

    Also links that lead out of the directory, whose target Ray would pack, and links to
    directories, which can form cycles. Raises ConfigError if the files are too large for Ray.
    """
    root = request.working_dir.resolve()
    excludes = [*EXCLUDES, *request.excludes]
    # Not public, but what Ray does: otherwise the size would be that of other files.
    skip = packaging._get_excludes(root, excludes)
    for directory, names, files in os.walk(root):
        for path in [Path(directory) / name for name in (*names, *files)]:
            stays = path.is_file() and path.resolve().is_relative_to(root)
            if path.is_symlink() and not stays:
                excludes.append(f"/{path.relative_to(root).as_posix()}")
        names[:] = [name for name in names if not skip(Path(directory) / name)]
    sizes = {path: path.stat().st_size for path in packed_files(root, excludes)}
    if sum(sizes.values()) > MAX_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        listed = ", ".join(f"{path.relative_to(root)} ({sizes[path]:,} bytes)" for path in largest)
        raise ConfigError(
            f"{root} has {sum(sizes.values()):,} bytes to send, and Ray accepts at most "
            f"{MAX_BYTES:,}. Largest: {listed}. Data does not belong into the package: put it on "
            "storage that all nodes see. Leave files out with a line in .gitignore or .rayignore"
        )
    return excludes


def packed_files(root: Path, excludes: Sequence[str]) -> list[Path]:
    """Return the files of a directory that Ray packs."""
    paths: list[Path] = []
    skip = packaging._get_excludes(root, list(excludes))
    packaging._dir_travel(root, [skip], paths.append, include_gitignore=True)
    return [path for path in paths if path.is_file()]
