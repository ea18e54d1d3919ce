"""`txl job`: txl commands as jobs of a Ray cluster, by Ray's Jobs API.

    words after `--` -> plan_job -> JobRequest -> RayJobs.submit -> dashboard on the head node
                     -> JobSupervisor (an actor) -> shell -> cd ROOT; txl ... --on auto

The words are parsed by the command itself, so a wrong option is refused here, with its message. So
is an invalid config, and everything that looks like a secret: the command and the files of a job
are readable by anyone with access to the cluster's dashboard.

What is sent: the resolved config of a training run, and the packages of this project as this
process imports them, so the cluster runs the code that submitted the job.

Ray's stop request is SIGTERM to the command and all its child processes, and SIGKILL after
RAY_JOB_STOP_WAIT_TIME_S, 3 seconds by default. The supervisor reads that variable in its own
environment, which is the job's: so every job sets it to the time that its command may take to end.
If the supervisor dies, Ray kills the command.
"""

import logging
import math
import os
import posixpath
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType

from cluster.connection import lines_of
from data_pipeline.system.sources import shown
from txl_dist.config.config_file import (
    dump_run_config,
    find_config,
    flatten_config,
    load_run_config,
    read_text,
)
from txl_dist.config.redaction import HIDDEN, redact
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError, PreemptedError, TxlError
from txl_dist.runtime.process import PACKAGES

COMMANDS = ("train", "prepare", "eval")
CONFIG_NAME = "config.yaml"
SHUTDOWN_SECONDS = 30
"""Beyond `training.grace_seconds`, for the end of the ranks and of the command."""
STOP_SECONDS = 60
"""How long `prepare` and `eval` may take to end; they keep no unfinished unit of work."""
REQUEST_SECONDS = 60.0
"""Time limit for a response of the API; Ray's client has none."""
POLL_SECONDS, MAX_POLL_SECONDS = 2.0, 30.0
BYTES_PER_SECOND = 1e6
"""Of a job's output: that of weeks has tens of megabytes."""
EXCLUDES = ("__pycache__", "*.pyc", ".env*", "*.pem", "*.key", "*password*", "*secret*")
"""Files among the sources that are not sent. The last ones usually contain secrets."""
_SECRETS_BELONG = (
    "Anyone with access to the cluster's dashboard could read it. Set secrets in the environment "
    "of the nodes, where `ray start` runs (for MLflow: MLFLOW_TRACKING_USERNAME, "
    "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN)"
)


# --- from words to a request ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A txl command to run on a cluster."""

    id: str
    command: str
    """`txl ...`, for people."""
    entrypoint: str
    """The shell command that Ray runs in the directory with the config."""
    stop_seconds: int
    """How long the command may take to end after a stop request."""
    config: str
    """Text of the config file that is sent, for `train`; else empty."""


def plan_job(
    words: Sequence[str], *, program: Any, root: str, python: str = "python"
) -> JobRequest:
    """Check a command and turn it into a request. `program` is `txl` as a command of typer.

    `root` is the directory on the cluster where relative paths begin. Raises ConfigError, or a
    usage error of typer.
    """
    name = words[0] if words else ""
    if name not in COMMANDS:
        raise ConfigError(f"{name!r} cannot be a job, only {', '.join(COMMANDS)}")
    if not posixpath.isabs(root):
        raise ConfigError(f"--root {root}: give an absolute path on the cluster")
    _refuse_secrets(words)
    context = program.commands[name].make_context(f"txl {name}", list(words[1:]))
    if any(re.match(r"--on(=|$)", word) for word in words):
        raise ConfigError("--on is not an option of a job, which runs on the cluster it is sent to")
    arguments, stop_seconds = list(words[1:]), STOP_SECONDS
    quoted, stem = [shlex.quote(word) for word in arguments], context.params.get("out") or ""
    config_text = ""
    if name == "train":
        given = context.params["config"]
        config = load_run_config(given, context.params["overrides"] or [])
        config_text = _text_to_send(given, config)
        stop_seconds = math.ceil(config.training.grace_seconds) + SHUTDOWN_SECONDS
        stem = Path(given).stem
        position = next(n for n, word in enumerate(arguments) if Path(word) == given)
        # The shell begins where Ray has unpacked the config.
        quoted[position] = f'"$OLDPWD"/{CONFIG_NAME}'
    readable = re.sub(r"[^A-Za-z0-9]+", "-", Path(stem).name)[:40].strip("-")
    # exec: otherwise the shell stays between Ray and the command, and dies of the stop signal.
    txl = f"exec {shlex.quote(python)} -P -m txl_dist {name} --on auto"
    return JobRequest(
        id="-".join(filter(None, ("txl", name, readable, secrets.token_hex(4)))),
        command=shlex.join(("txl", *words)),
        entrypoint=f"cd {shlex.quote(root)} && {txl} {' '.join(quoted)}",
        stop_seconds=stop_seconds,
        config=config_text,
    )


def _text_to_send(path: Path, config: RunConfig) -> str:
    """The resolved config; with `init_from` the file, because the model may be on the cluster only:
    there `model` is completed. Raises ConfigError if there is a secret in it.
    """
    for name, value in flatten_config(config).items():
        if HIDDEN in str(value):
            raise ConfigError(
                f"{name}={value}: a secret in the config, which would be uploaded. "
                f"{_SECRETS_BELONG}"
            )
    if config.init_from is None:
        return dump_run_config(config)
    text = read_text(find_config(path))
    if redact(text) != text:
        raise ConfigError(f"{path} has a secret, and would be uploaded. {_SECRETS_BELONG}")
    return text


def _refuse_secrets(words: Sequence[str]) -> None:
    for word in words:
        # The only option of these commands whose name looks like that of a secret.
        text = word.removeprefix("--text-key=")
        if redact(text) != text:
            raise ConfigError(f"{redact(text)}: a secret in the command. {_SECRETS_BELONG}")


def code_packages(folder: Path) -> list[Path]:
    """Return the packages of this project, and metadata with which they look installed."""
    installed = version("txl-dist")
    metadata = folder / f"txl_dist-{installed}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: txl-dist\nVersion: {installed}\n"
    (metadata / "METADATA").write_text(text)
    return [*(Path(import_module(package).__path__[0]) for package in PACKAGES), metadata]


# --- the client -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the cluster knows it."""

    id: str
    state: str
    """pending, running, succeeded, stopped or failed."""
    exit_code: int | None
    """Exit code of the txl command; None while it runs; 1 if unknown, as after a lost node."""
    message: str
    """What Ray says about it; of a failed job, with the last lines of its output."""
    command: str
    """`txl ...`."""


def job_of(details: JobDetails) -> Job:
    state, code = details.status.value.lower(), details.driver_exit_code
    if not details.status.is_terminal():
        code = None
    elif details.status == JobStatus.SUCCEEDED:
        code = 0
    elif details.status == JobStatus.STOPPED or code == PreemptedError.exit_code:
        state, code = "stopped", PreemptedError.exit_code  # Ray keeps no code of a stopped job
    elif code not in (1, 2, 3, 4, 5):
        code = 1  # killed, not started, or a shell's code for a missing command
    return Job(
        id=details.submission_id or "",
        state=state,
        exit_code=code,
        message=details.message or "",
        command=(details.metadata or {}).get("txl.command", details.entrypoint),
    )


class RayJobs(JobSubmissionClient):
    """Ray's client, for txl jobs and with a time limit for every request."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=REQUEST_SECONDS, **options)

    @property
    def accepts_anyone(self) -> bool:
        """Whether the API accepts jobs without a token, from anyone who can reach it."""
        answer = self._do_request("GET", "/api/authentication_mode")
        return bool(answer.ok and answer.json().get("authentication_mode") == "disabled")

    def submit(self, request: JobRequest) -> Job:
        """Upload the files, unless they are there, and start the job."""
        with TemporaryDirectory() as folder:
            runtime_env: dict[str, Any] = {
                "excludes": list(EXCLUDES),
                "py_modules": [str(module) for module in code_packages(Path(folder))],
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(request.stop_seconds)},
            }
            if request.config:
                config_path = Path(folder, "config", CONFIG_NAME)
                config_path.parent.mkdir()
                config_path.write_text(request.config, encoding="utf-8")
                runtime_env["working_dir"] = str(config_path.parent)
            self.submit_job(
                entrypoint=request.entrypoint,
                submission_id=request.id,
                runtime_env=runtime_env,
                metadata={"txl.command": request.command},
            )
        return self.job(request.id)

    def jobs(self) -> list[Job]:
        """Return all txl jobs that the cluster knows, oldest first."""
        known = [each for each in self.list_jobs() if each.type == JobType.SUBMISSION]
        known.sort(key=lambda details: details.start_time or 0)
        return [job_of(each) for each in known if "txl.command" in (each.metadata or {})]

    def job(self, job_id: str) -> Job:
        return job_of(self.get_job_info(job_id))

    def wait(self, job_id: str, write: Callable[[str], object] = lambda text: None) -> Job:
        """Return when the job has ended. `write` is called with all output, old and new."""
        # Not Ray's `tail_job_logs`, which has no time limit.
        num_written = 0
        while True:
            job = self.job(job_id)  # before its output, which then is complete
            with suppress(RuntimeError):  # no output: the command has not run, or its node is lost
                output = self.get_job_logs(job_id)
                write(output[num_written:])
                num_written = len(output)
            if job.exit_code is not None:
                write("" if num_written else f"{job.message}\n")
                return job
            # Every request brings the whole output.
            time.sleep(min(max(POLL_SECONDS, num_written / BYTES_PER_SECOND), MAX_POLL_SECONDS))


@contextmanager
def ray_jobs(address: str) -> Iterator[RayJobs]:
    """Connect to the dashboard at the URL `address`.

    Inside, errors of Ray's client and of the network become a TxlError: a ConfigError if nothing
    responds at the beginning, or if the token is missing or wrong.
    """
    url = shown(address)
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {url}: give the URL of the dashboard, http://HOST:8265")
    # The last two set a level of their own, and report every connection.
    for name in ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        os.environ.pop(name, None)  # Ray prefers them to an explicit address
    client = None
    try:
        client = RayJobs(address)
        yield client
    except ray.exceptions.AuthenticationError:
        raise ConfigError(
            f"the Ray cluster at {url} refuses the token of this machine, or there is none. Set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token of the cluster "
            "(default ~/.ray/auth_token; ray get-auth-token prints it there)"
        ) from None
    except BrokenPipeError:  # of our output, whose reader is gone
        raise
    except OSError as error:
        raise (TxlError if client else ConfigError)(
            f"no Ray cluster responds at {url}: {redact(lines_of(error)[0])}. Check that it runs "
            "with its dashboard, the port (default 8265), and the network or port-forward. If its "
            "head has failed, start it again and submit the same command: it resumes"
        ) from None
    except (RuntimeError, ValueError) as error:
        # The server sends its whole traceback, which ends with the reason.
        raise TxlError(f"{url}: {redact(lines_of(error)[-1])}") from None
