"""From the words after `txl job submit --` to a JobRequest: checked before anything is uploaded.

The words are parsed by the command itself, so a wrong option is refused here, with its message. So
is an invalid config, and everything that looks like a secret: the command and the environment of a
job are readable by anyone with access to the cluster's dashboard.
"""

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from txl_dist.cli.options import paths_of_another_machine
from txl_dist.config.redaction import HIDDEN, redact, redact_field
from txl_dist.errors import ConfigError
from txl_dist.launch.jobs import COMMANDS, JobRequest

if TYPE_CHECKING:
    from txl_dist.config.run_config import RunConfig

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
    parameters = _parse(words)
    common: dict[str, Any] = {
        "root": root,
        "environment": environment,
        "python": python,
        "working_dir": working_dir,
    }
    if words[0] == "train":
        return _plan_training(words, parameters, exclude, common)
    # Preparations are the same job if they write the same dataset, evaluations if the words agree.
    out = str(parameters.get("out") or "")
    identity = [posixpath.normpath(posixpath.join(root, out))] if out else [root, *words[1:]]
    return JobRequest(
        name=_name(words[0], posixpath.basename(out), identity),
        words=(words[0], "--on", "auto", *words[1:]),
        stop_seconds=STOP_SECONDS,
        excludes=(*exclude, *_patterns([Path(out)] if out else [], working_dir)),
        **common,
    )


def _plan_training(
    words: Sequence[str],
    parameters: Mapping[str, Any],
    exclude: Sequence[str],
    common: Mapping[str, Any],
) -> JobRequest:
    from txl_dist.config.config_file import load_run_config

    path, working_dir = Path(parameters["config"]), Path(common["working_dir"])
    config = load_run_config(path, parameters["overrides"] or [])
    _refuse_secrets_of(config)
    if not path.resolve().is_relative_to(working_dir.resolve()):
        raise ConfigError(
            f"{path} is not in {working_dir.resolve()}, whose files are sent to the cluster; give "
            "its directory with --working-dir"
        )
    packed = path.resolve().relative_to(working_dir.resolve())
    # The config becomes the first argument, where cluster/job_driver.py expects it.
    position = next(n for n, word in enumerate(words) if n and Path(word) == path)
    others = (word for n, word in enumerate(words) if n not in (0, position))
    run = posixpath.normpath(posixpath.join(common["root"], config.directory))
    return JobRequest(
        name=_name("train", posixpath.basename(run), [run]),
        words=("train", packed.as_posix(), "--on", "auto", *others),
        log=f"{run}/logs/driver.log",
        stop_seconds=math.ceil(config.training.grace_seconds) + SHUTDOWN_SECONDS,
        excludes=(*exclude, *_patterns(_local_paths(config), working_dir)),
        config=packed.as_posix(),
        **common,
    )


def _patterns(paths: Sequence[Path], working_dir: Path) -> list[str]:
    """Patterns of the paths that are in the working directory: runs and datasets are not sent."""
    root = working_dir.resolve()
    inside = [path for path in ((root / path).resolve() for path in paths) if path != root]
    return [f"/{path.relative_to(root).as_posix()}" for path in inside if path.is_relative_to(root)]


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """The parameters of a txl command, parsed and validated by the command line itself."""
    with paths_of_another_machine():
        context = _command(words[0]).make_context(words[0], list(words[1:]))
    if any(re.match(r"--on(=|$)", word) for word in words):
        raise ConfigError("--on is not an option of a job, which runs on the cluster it is sent to")
    return dict(context.params)


@cache
def _command(name: str) -> Any:
    from txl_dist.cli.app import app

    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


def _local_paths(config: "RunConfig") -> list[Path]:
    corpora = (corpus.path for corpus in (config.data.mixture or {}).values())
    paths = (config.directory, config.data.path, config.evaluation.path, *corpora)
    return [Path(path) for path in paths if path]


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
