"""Jobs: what `txl job submit` sends to a Ray cluster, checked before.

    words after `--` -> plan_job -> JobRequest -> RayJobs.submit -> cluster/job_driver.py -> txl

The words are parsed by the command itself, so a wrong option is refused here, with its message. So
is an invalid config, and everything that looks like a secret: the command and the environment of a
job are readable by anyone with access to the cluster's dashboard.

A job has a name that depends only on what it writes, and a number per attempt: NAME-1, NAME-2, ...
So two submissions of the same run have the same name, and the second one finds the first.
"""

import hashlib
import math
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from data_pipeline.errors import counted
from txl_dist.config.redaction import HIDDEN, redact, redact_field
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.config.run_config import RunConfig

COMMANDS = ("train", "prepare", "eval")
"""The txl commands that can be jobs."""
EXIT_LINE = "txl job: exit code "
"""Last line of a job's log, followed by the code. Ray does not keep the code of a stopped job."""
MAX_BYTES = 100 * 2**20
"""Ray's limit for an upload to its Jobs API (`DASHBOARD_CLIENT_MAX_SIZE` of Ray 2.60)."""
SHUTDOWN_SECONDS = 30
"""Beyond `training.grace_seconds`, for the end of the ranks and of the driver."""
STOP_SECONDS = 60
"""How long `prepare` and `eval` may take to end; they keep no unfinished unit of work."""
_SECRETS_BELONG = (
    "Anyone with access to the cluster's dashboard could read it. Set secrets in the environment "
    "of the nodes, where `ray start` runs (for MLflow: MLFLOW_TRACKING_USERNAME, "
    "MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN)"
)
# The only option of these commands whose name looks like that of a secret.
_TEXT_KEY = "--text-key="
JobState = Literal["pending", "running", "done", "stopped", "failed"]


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
    config: str | None = None
    """A file of `working_dir` that has to be sent."""

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


def client_class() -> Any:
    """`cluster.jobs.RayJobs`, the client of a cluster; by name, because its package imports this
    one.
    """
    return resolve_name("cluster.jobs:RayJobs")


# --- attempts of a run ----------------------------------------------------------------------------


def attempts_of(name: str, jobs: Sequence[Job]) -> list[Job]:
    """The attempts of a run, oldest first; also if `name` is the id of one attempt, or the name
    without the digest. Raises ConfigError if several runs have that name.
    """
    attempts: list[Job] = []
    for end in ("", r"-\d+", r"-[0-9a-f]{8}-\d+"):
        form = re.compile(re.escape(name) + end)
        attempts = attempts or [job for job in jobs if form.fullmatch(job.id)]
    runs = sorted({job.id.rpartition("-")[0] for job in attempts})
    if len(runs) > 1:
        raise ConfigError(f"{name} are several runs: {', '.join(runs)}. Name one of them")
    return sorted(attempts, key=_attempt_number)


def next_attempt_id(name: str, attempts: Iterable[Job]) -> str:
    """An unused id. Ray refuses ids that it has seen before."""
    return f"{name}-{max(map(_attempt_number, attempts), default=0) + 1}"


def _attempt_number(job: Job) -> int:
    return int(job.id.rpartition("-")[2])


def describe_package(sizes: Mapping[str, int]) -> str:
    return f"{counted(len(sizes), 'file')}, {_mib(sum(sizes.values()))} before compression"


def require_size(sizes: Mapping[str, int], limit_bytes: int = MAX_BYTES) -> None:
    """Raise ConfigError naming the largest entries if the files have more bytes than that."""
    if sum(sizes.values()) <= limit_bytes:
        return
    entries: Counter[str] = Counter()
    for name, size in sizes.items():
        directory, separator, _ = name.partition("/")
        entries[directory + separator] += size
    listed = ", ".join(f"{name} ({_mib(size)})" for name, size in entries.most_common(5))
    raise ConfigError(
        f"the package has {describe_package(sizes)}, and Ray accepts at most "
        f"{limit_bytes / 2**20:g} MiB. Largest: {listed}. Data does not belong into the package: "
        "put it on storage that all nodes see. Leave files out with --exclude PATTERN, or with a "
        "line in .gitignore or .rayignore"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


# --- from words to a request ----------------------------------------------------------------------


def plan_job(
    words: Sequence[str],
    *,
    root: str,
    working_dir: Path,
    environment: Mapping[str, str],
    python: str,
    exclude: Sequence[str] = (),
) -> JobRequest:
    """Check a command and turn it into a request. Raises ConfigError, or a usage error of typer."""
    if not words or words[0] not in COMMANDS:
        raise ConfigError(
            f"{words[0] if words else 'nothing'!r} cannot be a job; write txl job submit -- "
            f"{'|'.join(COMMANDS)} ARGS..."
        )
    _refuse_secrets(words, environment)
    if not posixpath.isabs(root):
        raise ConfigError(f"--root {root}: give an absolute path on the cluster")
    parameters, directory = _parse(words), working_dir.resolve()
    if words[0] == "train":
        details, local_paths = _plan_training(words, parameters, root, directory)
    else:
        # Preparations are the same job if they write the same dataset, evaluations if the words
        # agree.
        out = str(parameters.get("out") or "")
        identity = [posixpath.normpath(posixpath.join(root, out))] if out else [root, *words[1:]]
        local_paths = [out]
        details = {
            "name": _name(words[0], posixpath.basename(out), identity),
            "words": (words[0], "--on", "auto", *words[1:]),
        }
    # Runs and datasets in the working directory are not sent.
    paths = [(directory / path).resolve() for path in local_paths if path]
    inside = [path for path in paths if path != directory and path.is_relative_to(directory)]
    patterns = [f"/{path.relative_to(directory).as_posix()}" for path in inside]
    return JobRequest(
        root=root,
        environment=environment,
        python=python,
        working_dir=working_dir,
        excludes=(*exclude, *patterns),
        **details,
    )


def _plan_training(
    words: Sequence[str], parameters: Mapping[str, Any], root: str, directory: Path
) -> tuple[dict[str, Any], list[str | None]]:
    """Fields of the request, and paths of the run and its data."""
    from txl_dist.config.config_file import load_run_config
    from txl_dist.config.named_configs import find_config, is_sent_with_the_code

    given = Path(parameters["config"])
    path = find_config(given).resolve()
    config = load_run_config(path, parameters["overrides"] or [])
    _refuse_secrets_of(config)
    packed = path.relative_to(directory).as_posix() if path.is_relative_to(directory) else None
    if packed is None and not is_sent_with_the_code(path):
        raise ConfigError(
            f"{path} is not in {directory}, whose files are sent to the cluster; give its "
            "directory with --working-dir"
        )
    # The config becomes the first argument, where cluster/job_driver.py expects it.
    position = next(n for n, word in enumerate(words) if n and Path(word) == given)
    others = (word for n, word in enumerate(words) if n not in (0, position))
    run = posixpath.normpath(posixpath.join(root, config.directory))
    details = {
        "name": _name("train", posixpath.basename(run), [run]),
        "words": ("train", packed or str(given), "--on", "auto", *others),
        "stop_seconds": math.ceil(config.training.grace_seconds) + SHUTDOWN_SECONDS,
        "config": packed,
    }
    corpora = [corpus.path for corpus in (config.data.mixture or {}).values()]
    return details, [config.directory, config.data.path, config.evaluation.path, *corpora]


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """The parameters of a txl command, parsed and validated by the command line itself."""
    import typer

    from txl_dist.cli.app import app
    from txl_dist.cli.options import paths_of_another_machine

    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    with paths_of_another_machine():
        context = command.make_context(f"txl {words[0]}", list(words[1:]))
    if any(re.match(r"--on(=|$)", word) for word in words):
        raise ConfigError("--on is not an option of a job, which runs on the cluster it is sent to")
    return dict(context.params)


def _name(command: str, stem: str, identity: Sequence[str]) -> str:
    """`txl-train-tiny-0123abcd`: readable, legal in a URL, and different for different runs."""
    digest = hashlib.sha256("\0".join((command, *identity)).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", stem)[:40].strip("-")
    return "-".join(filter(None, ("txl", command, readable, digest)))


def _refuse_secrets(words: Sequence[str], environment: Mapping[str, str]) -> None:
    for word in words:
        text = word.removeprefix(_TEXT_KEY)
        if redact(text) != text:
            raise ConfigError(f"{redact(text)}: a secret in the command. {_SECRETS_BELONG}")
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {name!r} is not the name of an environment variable")
        if redact_field(name, value) != value or redact(value) != value:
            raise ConfigError(f"--env {name}={HIDDEN}: a secret. {_SECRETS_BELONG}")


def _refuse_secrets_of(config: "RunConfig") -> None:
    from txl_dist.config.config_file import flatten_config

    for name, value in flatten_config(config).items():
        if HIDDEN in str(value):
            raise ConfigError(
                f"{name}={value}: a secret in the config, which would be uploaded. "
                f"{_SECRETS_BELONG}"
            )
