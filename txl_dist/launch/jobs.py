"""Jobs: txl commands that run on a Ray cluster and are started, watched and stopped from elsewhere.

    JobRequest -> JobClient.submit -> the driver (cluster/job_driver.py) -> txl train|prepare|eval

A job has a name that depends only on what it writes, and a number per attempt: NAME-1, NAME-2, ...
So two submissions of the same run have the same name, and the second one finds the first.
The client is found by name, because this package must not import `cluster`.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal, Protocol

from txl_dist.errors import ConfigError

COMMANDS = ("train", "prepare", "eval")
"""The txl commands that can be jobs."""
EXIT_LINE = "txl job: exit code "
"""Last line of a job's log, followed by the code. Ray does not keep the code of a stopped job."""
CLIENT = EntryPoint("ray", "cluster.jobs:RayJobs", "txl.jobs")
MAX_BYTES = 100 * 2**20
"""Ray's limit for an upload to its Jobs API (`DASHBOARD_CLIENT_MAX_SIZE` of Ray 2.60)."""
NUM_LISTED = 5
"""Largest entries in the message about a package that is too large."""
_MIB = 2**20
JobState = Literal["pending", "running", "done", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A txl command to run on a cluster."""

    name: str
    """Identifies the run; the id of an attempt is this with a number."""
    words: tuple[str, ...]
    """The command without `txl`. The path of a run config is relative to the package."""
    root: str
    """Absolute path on the cluster, seen by all nodes; all other relative paths begin there."""
    log: str | None = None
    """File on the cluster for a copy of the driver's output; None: no copy."""
    stop_seconds: int = 60
    """How long the command may take to end after a stop request; then Ray kills it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command and of all its workers. Anyone with access to the
    cluster can read them."""
    python: str = "python"
    """The Python interpreter on the cluster."""
    working_dir: Path = Path()
    """Its files are sent to the cluster, with the code of this project."""
    excludes: tuple[str, ...] = ()
    """Patterns of files that are not sent, as in .gitignore, relative to `working_dir`."""
    config: str | None = None
    """A file of `working_dir` that has to be sent."""

    @property
    def command(self) -> str:
        """`txl ...`, for people and to compare requests."""
        return shlex.join(("txl", *self.words))

    @property
    def entrypoint(self) -> str:
        """The shell command that Ray runs in the unpacked package."""
        log = ("--log", self.log) if self.log else ()
        words = (self.python, "-P", "-m", "cluster.job_driver", "--root", self.root, *log)
        # exec: otherwise a shell stays between Ray and the driver, and dies of the stop signal.
        return f"exec {shlex.join((*words, '--', *self.words))}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt, as the cluster knows it."""

    id: str
    state: JobState
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


class JobExistsError(ConfigError):
    """The id of a new job is taken: another client submitted the same run at the same time."""


@dataclass(frozen=True)
class Package:
    """The files that are sent with a job."""

    sizes: Mapping[str, int]
    """Name -> bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def __str__(self) -> str:
        return f"{len(self.sizes):,} files, {self.num_bytes / _MIB:,.1f} MiB before compression"

    def require_size(self, limit_bytes: int = MAX_BYTES) -> None:
        """Raise ConfigError naming the largest entries if the files have more bytes than that."""
        if self.num_bytes <= limit_bytes:
            return
        entries: Counter[str] = Counter()
        for name, size in self.sizes.items():
            directory, separator, _ = name.partition("/")
            entries[directory + separator] += size
        listed = ", ".join(
            f"{name} ({size / _MIB:,.1f} MiB)" for name, size in entries.most_common(NUM_LISTED)
        )
        raise ConfigError(
            f"the package has {self}, and Ray accepts at most {limit_bytes / _MIB:g} MiB. Largest: "
            f"{listed}. Data does not belong into the package: put it on storage that all nodes "
            "see. Leave files out with --exclude PATTERN, or with a line in .gitignore or "
            ".rayignore"
        )


class JobClient(Protocol):
    """The Jobs API of one cluster. Methods raise TxlError if the cluster does not respond."""

    url: str
    """Without credentials."""

    def __init__(self, address: str | None) -> None:
        """Connect to the URL of a dashboard, the address of a head, or None (automatic). Raises
        ConfigError if nothing responds or the token is missing or wrong.
        """

    @staticmethod
    def package(request: JobRequest) -> Package:
        """The files that `submit` would send. Contacts no cluster. Raises ConfigError."""

    @property
    def needs_token(self) -> bool:
        """Whether the API refuses requests without a token."""

    def submit(self, request: JobRequest, job_id: str) -> None:
        """Upload the files, unless they are there, and start the job. Raises JobExistsError."""

    def jobs(self) -> list[Job]:
        """All txl jobs that the cluster knows, oldest first."""

    def job(self, job_id: str) -> Job:
        """Raises ConfigError if there is no such job."""

    def logs(self, job_id: str) -> str:
        """All output of the driver."""

    def follow(self, job_id: str, write: Callable[[str], object]) -> Job:
        """Call `write` with all output, old and new, until the job ends."""

    def wait(self, job_id: str) -> Job:
        """Return when the job has ended."""

    def stop(self, job_id: str) -> bool:
        """Ask a job to stop; False if it has already ended."""


def job_client() -> type[JobClient]:
    """The client of Ray's clusters."""
    client: type[JobClient] = CLIENT.load()
    return client


def attempts_of(name: str, jobs: Iterable[Job]) -> list[Job]:
    """The attempts of a run, oldest first; also if `name` is the id of one attempt."""
    attempts = [job for job in jobs if job.id == name] or [
        job for job in jobs if re.fullmatch(rf"{re.escape(name)}-\d+", job.id)
    ]
    return sorted(attempts, key=_attempt_number)


def runs_named(name: str, jobs: Iterable[Job]) -> list[str]:
    """The names of all runs that are `name` and a digest of what they write."""
    form = re.compile(rf"({re.escape(name)}-[0-9a-f]{{8}})-\d+")
    return sorted({match[1] for job in jobs if (match := form.fullmatch(job.id))})


def next_attempt_id(name: str, attempts: Iterable[Job]) -> str:
    """An unused id. Ray refuses ids that it has seen before."""
    return f"{name}-{max(map(_attempt_number, attempts), default=0) + 1}"


def _attempt_number(job: Job) -> int:
    return int(job.id.rpartition("-")[2])
