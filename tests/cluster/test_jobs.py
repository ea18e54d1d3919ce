"""Jobs without a cluster: the plan of a command, errors of the client, what is sent, commands."""

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from ray.job_submission import JobDetails, JobStatus, JobType
from typer.testing import CliRunner

from cluster import jobs
from cluster.jobs import (
    SHUTDOWN_SECONDS,
    JobRequest,
    RayJobs,
    code_packages,
    job_of,
    plan_job,
    ray_jobs,
)
from tests.support.commands import run_txl
from tests.support.training_runs import TINY
from tests.support.web_server import web_server
from txl_dist.cli.app import app
from txl_dist.errors import ConfigError

# --- from words to a request ----------------------------------------------------------------------

TRAIN = ("train", str(TINY), "--ranks", "2", "seed=4")


def plan(*words: str, root: str = "/shared") -> JobRequest:
    return plan_job(words, program=typer.main.get_command(app), root=root)


def assert_refused(message: str, *words: str) -> None:
    """The message does not repeat a secret."""
    with pytest.raises(ConfigError, match=message) as error:
        plan(*words)
    assert "CANARY" not in str(error.value)


def test_the_command_runs_in_the_root_with_the_resolved_config() -> None:
    request = plan("train", "--ranks", "2", str(TINY), "seed=4")
    assert request.entrypoint == (
        "cd /shared && exec python -P -m txl_dist train --on auto --ranks 2 "
        '"$OLDPWD"/config.yaml seed=4'
    )
    assert yaml.safe_load(request.config)["seed"] == 4
    assert request.id.startswith("txl-train-tiny-")
    assert request.stop_seconds == 25 + SHUTDOWN_SECONDS
    assert plan(*TRAIN, "training.grace_seconds=99.5").stop_seconds == 100 + SHUTDOWN_SECONDS
    request = plan("prepare", "books/", "--out", "data/my books", "--text-key=content")
    assert request.id.startswith("txl-prepare-my-books-")
    assert request.config == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "data"), "'bench' cannot be a job"),
        (("train", str(TINY), "--on", "ray"), "--on is not an option"),
        (("prepare", "a", "--out", "b", "--on=processes"), "--on is not an option"),
        (("train", str(TINY), "model.d_modle=4"), "did you mean"),
        (("train", "/etc/passwd"), "/etc/passwd"),
    ],
)
def test_an_invalid_command_is_refused(words: tuple[str, ...], message: str) -> None:
    assert_refused(message, *words)
    with pytest.raises(ConfigError, match="absolute path on the cluster"):
        plan(*TRAIN, root="shared")


@pytest.mark.fault_row(44)
@pytest.mark.parametrize(
    "words",
    [
        ("train", str(TINY), "tracking.uri=http://user:CANARY@host:5000"),
        ("train", str(TINY), "tracking.uri=http://host?api_key=CANARY"),
        ("prepare", "https://u:CANARY@host/a.txt", "--out", "b"),
        ("eval", "a", "s3://CANARY:x@bucket/data"),
    ],
)
def test_a_secret_in_the_command_is_refused_and_not_printed(words: tuple[str, ...]) -> None:
    assert_refused("a secret", *words)


@pytest.mark.fault_row(44)
def test_a_config_whose_model_is_on_the_cluster_is_sent_as_it_is(tmp_path: Path) -> None:
    """There, the command completes `model` with the settings of the weights."""
    request = plan("train", str(TINY), "init_from=/shared/model", "seed=4")
    assert request.config == TINY.read_text()
    assert request.entrypoint.endswith('"$OLDPWD"/config.yaml init_from=/shared/model seed=4')
    path = tmp_path / "run.yaml"
    path.write_text(f"{TINY.read_text()}init_from: /shared/model\n# password=CANARY\n")
    assert_refused("has a secret", "train", str(path))


def test_a_secret_in_the_config_is_refused(tmp_path: Path) -> None:
    text = TINY.read_text().replace(
        "enabled: false", "enabled: true\n  uri: postgresql://u:CANARY@h/d"
    )
    (tmp_path / "run.yaml").write_text(text)
    assert_refused(r"tracking\.uri=.*a secret in the config", "train", str(tmp_path / "run.yaml"))
    replaced = plan("train", str(tmp_path / "run.yaml"), "tracking.uri=sqlite:///mlflow.db")
    assert "CANARY" not in replaced.config, "only the resolved config is sent"


HOSTILE = (
    "a b",
    "x;touch /tmp/no",
    "$(id)",
    "`id`",
    "it's",
    "--",
    "\n",
    "*",
    "data.path=/d #",
    "é",
)


@pytest.mark.fault_row(45)
def test_no_word_of_a_command_is_interpreted_by_the_shell(tmp_path: Path) -> None:
    root = tmp_path / "r '$HOME'"
    root.mkdir()
    words = ("train", str(TINY), *(f"directory=a{word}" for word in HOSTILE))
    request = plan(*words, root=str(root))
    ended = subprocess.run(
        # printf instead of python: prints its arguments, each ended by a NUL.
        request.entrypoint.replace("exec python -P", "pwd && printf '%s\\0'", 1),
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    directory, _, printed = ended.stdout.partition("\n")
    assert directory == str(root)
    config = str(tmp_path / "config.yaml")
    expected = ["-m", "txl_dist", "train", "--on", "auto", config, *words[2:]]
    assert printed.split("\0")[:-1] == expected
    assert shlex.split(request.command) == ["txl", *words]


# --- the client -----------------------------------------------------------------------------------

CODE = {"cluster", "data_pipeline", "txl_dist"} | {f"txl_dist-{version('txl-dist')}.dist-info"}


def api(status: int, mode: str = "token") -> AbstractContextManager[str]:
    """A dashboard that answers every request with `status`, and says how it authenticates."""

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        is_public = request.path == "/api/authentication_mode"
        body = {"authentication_mode": mode, "ray_version": "2.60.0"}
        return 200 if is_public else status, json.dumps(body)

    return web_server(answer)


def connect(address: str) -> RayJobs:
    with ray_jobs(address) as client:
        return client


def details(status: JobStatus, code: int | None = None, message: str = "") -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION,
        submission_id="txl-a-1",
        status=status,
        entrypoint="exec python",
        metadata={"txl.command": "txl train a.yaml"},
        message=message,
        driver_exit_code=code,
        start_time=1_000,
        end_time=3_000,
    )


@pytest.mark.fault_row(43)
@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_or_wrong_token_is_a_config_error(status: int) -> None:
    with api(status) as url, pytest.raises(ConfigError, match=f"{url} .*RAY_AUTH_TOKEN_PATH"):
        connect(url)


@pytest.mark.fault_row(43)
def test_an_api_that_answers_without_a_token_is_noticed() -> None:
    with api(200) as url:
        assert not connect(url).accepts_anyone
    with api(200, mode="disabled") as url:
        assert connect(url).accepts_anyone


def test_an_explicit_address_is_used_even_if_the_environment_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with api(200) as url, api(401) as other:
        monkeypatch.setenv("RAY_ADDRESS", other)
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", other)
        assert connect(url)._address == url


@pytest.mark.parametrize("address", ["http://user:CANARY@127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster_is_rejected_without_its_password(address: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1") as error:
        connect(address)
    assert "CANARY" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (JobStatus.RUNNING, None, ("running", None)),
        (JobStatus.SUCCEEDED, 0, ("succeeded", 0)),
        (JobStatus.FAILED, 2, ("failed", 2)),
        (JobStatus.FAILED, 75, ("stopped", 75)),
        (JobStatus.FAILED, 127, ("failed", 1)),
        (JobStatus.FAILED, -9, ("failed", 1)),
        (JobStatus.FAILED, None, ("failed", 1)),
        (JobStatus.STOPPED, None, ("stopped", 75)),
    ],
)
def test_exit_codes(status: JobStatus, code: int | None, expected: tuple[str, int | None]) -> None:
    job = job_of(details(status, code))
    assert (job.state, job.exit_code) == expected


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.fault_row(44)
def test_the_resolved_config_and_the_code_travel_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: dict[str, list[str]] = {}

    def submit_job(client: RayJobs, *, runtime_env: dict[str, Any], **_: object) -> None:
        sent["config"] = [path.name for path in Path(runtime_env["working_dir"]).rglob("*")]
        sent["modules"] = [Path(module).name for module in runtime_env["py_modules"]]

    monkeypatch.setattr(RayJobs, "submit_job", submit_job)
    monkeypatch.setattr(RayJobs, "job", lambda client, job_id: None)
    with api(200) as url:
        connect(url).submit(plan(*TRAIN))
    assert sent["config"] == ["config.yaml"]
    assert set(sent["modules"]) == CODE


@pytest.mark.slow
def test_the_code_that_is_sent_runs_where_this_project_is_not_installed(tmp_path: Path) -> None:
    folders = []
    for module in code_packages(tmp_path):  # Ray unpacks each into a folder of its own
        folders.append(folder := tmp_path / f"unpacked-{module.name}")
        shutil.copytree(module, folder / module.name)
    program = (
        "import txl_dist; from txl_dist.launch.launcher import find_launcher as f;"
        "from importlib.metadata import version;"
        "print(txl_dist.__file__, version('txl-dist'), f('processes'), f('ray'))"
    )
    libraries = tmp_path / "libraries"  # site-packages without this project
    libraries.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "txl_dist" not in path.name:
            (libraries / path.name).symlink_to(path)
    # -S: no .pth files, so no editable installation.
    ended = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program],
        env={"PYTHONPATH": ":".join(map(str, [*folders, libraries]))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    assert ended.stdout.startswith(str(tmp_path / "unpacked-txl_dist"))
    assert "RayLauncher" in ended.stdout


# --- the commands, with a cluster in memory -------------------------------------------------------

SUBMIT = ("job", "submit", "--root", "/shared")
RUN = ("--", "train", TINY, "--ranks", 2)


class MemoryCluster(RayJobs):
    """Jobs that are plain data, in place of those of a cluster."""

    mode = "token"

    def __init__(self, address: str) -> None:
        self.known: dict[str, JobDetails] = {}

    def submit_job(self, *, submission_id: str, **options: Any) -> str:
        update = {"submission_id": submission_id, "start_time": 1000 * len(self.known)}
        self.known[submission_id] = details(JobStatus.RUNNING).model_copy(update=update)
        return submission_id

    def end(self, job_id: str, status: JobStatus, code: int) -> None:
        update = {"status": status, "driver_exit_code": code, "message": "ConfigError: the cause"}
        self.known[job_id] = self.known[job_id].model_copy(update=update)

    def list_jobs(self) -> list[JobDetails]:
        return list(self.known.values())

    def get_job_info(self, job_id: str) -> JobDetails:
        if job_id not in self.known:
            raise RuntimeError("Request failed with status code 404: no such job")
        return self.known[job_id]

    def get_job_logs(self, job_id: str) -> str:
        return f"output of {job_id}\n"

    def stop_job(self, job_id: str) -> bool:
        return self.known[job_id].status == JobStatus.RUNNING

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        mode = {"authentication_mode": self.mode}
        return SimpleNamespace(ok=True, json=lambda: mode)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    memory = MemoryCluster("")
    monkeypatch.setattr(jobs, "RayJobs", lambda address: memory)
    return memory


def test_a_job_whose_command_never_ran_says_why(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_logs(job_id: str) -> str:
        raise RuntimeError("status code 500: no such file")

    assert run_txl(*SUBMIT, *RUN)[0] == 0
    (job_id,) = cluster.known
    cluster.end(job_id, JobStatus.FAILED, -1)
    monkeypatch.setattr(cluster, "get_job_logs", no_logs)
    code, output = run_txl("job", "logs", "--follow", job_id)
    assert code == 1
    assert "ConfigError: the cause" in output
    assert f"txl job logs {job_id}" in output
    assert "already ended" in run_txl("job", "stop", job_id)[1]


def test_with_json_only_the_job_is_on_standard_output(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(seconds: float) -> None:
        cluster.end(next(iter(cluster.known)), JobStatus.SUCCEEDED, 0)

    monkeypatch.setattr(jobs.time, "sleep", end)
    ended = CliRunner().invoke(app, [str(word) for word in (*SUBMIT, "--follow", "--json", *RUN)])
    (job_id,) = cluster.known
    assert json.loads(ended.stdout)["id"] == job_id
    assert ended.stderr.count(f"output of {job_id}") == 1
    cluster.mode = "disabled"
    assert "accepts jobs without a token" in run_txl("job", "list")[1]
    cluster.mode = "token"
    (listed,) = json.loads(run_txl("job", "list", "--json")[1])["jobs"]
    assert (listed["id"], listed["state"], listed["exit_code"]) == (job_id, "succeeded", 0)


def test_an_unknown_job_and_an_invalid_option_are_refused(cluster: MemoryCluster) -> None:
    code, output = run_txl("job", "status", "txl-train-other")
    assert (code, "no such job" in output) == (1, True)
    code, output = run_txl("job", "submit", "--", "train", TINY, "--rankz", 2)
    assert (code, "No such option: --rankz" in output) == (2, True)
    assert cluster.known == {}
