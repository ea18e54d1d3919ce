"""Jobs without a cluster: the plan of a command, errors of the client, what is sent, commands."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from ray._private import ray_constants
from ray.job_submission import JobDetails, JobStatus, JobType
from typer.testing import CliRunner

from cluster import jobs
from cluster.jobs import (
    EXIT_LINE,
    MAX_BYTES,
    SHUTDOWN_SECONDS,
    JobRequest,
    RayJobs,
    code_packages,
    excludes_of,
    job_of,
    packed_files,
    plan_job,
)
from tests.support.commands import run_txl
from tests.support.training_runs import TINY
from txl_dist.cli.app import app
from txl_dist.errors import ConfigError, TxlError

# --- from words to a request ----------------------------------------------------------------------

TRAIN = ("train", str(TINY), "--ranks", "2", "seed=4")


def plan(*words: str, root: str = "/shared", env: tuple[str, ...] = ()) -> JobRequest:
    return plan_job(
        words,
        program=typer.main.get_command(app),
        root=root,
        working_dir=TINY.parents[1],
        environment=env,
    )


def name(*words: str, root: str = "/shared") -> str:
    return plan(*words, root=root).name


def test_a_run_has_one_name_however_it_is_written() -> None:
    run = name(*TRAIN)
    assert run.startswith("txl-train-tiny-")
    assert name(*TRAIN, "optimizer.lr=0.5") == run, "the run directory identifies a run"
    assert name("train", "--ranks=2", str(TINY)) == run
    assert name(*TRAIN, "directory=./runs//tiny") == run
    assert name(*TRAIN, "directory=/shared/runs/tiny", root="/other") == run
    assert name(*TRAIN, "directory=runs/tiny2") != run
    assert name(*TRAIN, root="/other") != run


def test_preparations_are_named_by_their_output_and_evaluations_by_their_words() -> None:
    books = name("prepare", "books/", "--out", "data/books", "--text-key=content")
    assert books.startswith("txl-prepare-books-")
    assert name("prepare", "more/", "--out", "/shared/data/books", "--workers", "9") == books
    assert name("eval", "runs/a", "data/a") == name("eval", "runs/a", "data/a")
    assert name("eval", "runs/a", "data/a") != name("eval", "runs/b", "data/a")


def test_the_command_runs_on_the_cluster_with_the_config_of_the_package() -> None:
    request = plan("train", "--ranks", "2", str(TINY), "seed=4")
    assert request.words[:6] == ("train", "configs/tiny.yaml", "--on", "auto", "--ranks", "2")
    assert request.excludes == ("/runs/tiny", "/data/tiny")
    assert request.stop_seconds == 25 + SHUTDOWN_SECONDS
    assert plan(*TRAIN, "training.grace_seconds=99.5").stop_seconds == 100 + SHUTDOWN_SECONDS
    assert plan("eval", "a", "b").words == ("eval", "--on", "auto", "a", "b")
    assert plan(*TRAIN, env=("OMP_NUM_THREADS=2",)).environment == {"OMP_NUM_THREADS": "2"}


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
    with pytest.raises(ConfigError, match=message):
        plan(*words)


def test_a_config_outside_the_working_directory_and_a_relative_root_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.yaml").write_text(TINY.read_text())
    with pytest.raises(ConfigError, match="--working-dir"):
        plan("train", str(tmp_path / "run.yaml"))
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
    with pytest.raises(ConfigError, match="a secret") as error:
        plan(*words)
    assert "CANARY" not in str(error.value)


@pytest.mark.fault_row(44)
def test_a_secret_in_the_config_is_refused(tmp_path: Path) -> None:
    text = TINY.read_text().replace(
        "enabled: false", "enabled: true\n  uri: postgresql://u:CANARY@h/d"
    )
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"tracking\.uri=.*a secret in the config") as error:
        plan("train", str(tmp_path / "run.yaml"))
    assert "CANARY" not in str(error.value)


@pytest.mark.fault_row(44)
@pytest.mark.parametrize(
    "variable",
    ["AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "RAY_AUTH_TOKEN", "apiKey"],
)
def test_a_secret_environment_variable_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match="a secret") as error:
        plan(*TRAIN, env=(f"{variable}=CANARY",))
    assert "CANARY" not in str(error.value)


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
def test_no_word_of_a_command_is_interpreted_by_the_shell() -> None:
    request = JobRequest(name="n", words=("train", *HOSTILE), root="/r '$HOME'", python="printf")
    ended = subprocess.run(
        # printf instead of python: prints its arguments, each ended by a NUL.
        request.entrypoint.replace(" -P ", " '%s\\0' ", 1),
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    words = ended.stdout.split("\0")[:-1]
    expected = ["-m", "cluster.job_driver", "--root", "/r '$HOME'", "--", "train", *HOSTILE]
    assert words == expected
    assert shlex.split(request.command) == ["txl", "train", *HOSTILE]


# --- the client -----------------------------------------------------------------------------------

CODE = {"cluster", "data_pipeline", "txl_dist"} | {f"txl_dist-{version('txl-dist')}.dist-info"}
LOGS = "step 9 | loss 1\nPreemptedError\n"


@contextmanager
def api(status: int, mode: str = "token") -> Iterator[str]:
    """The URL of a dashboard that answers every request with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            public = self.path == "/api/authentication_mode"
            body = {"authentication_mode": mode, "ray_version": "2.60.0"}
            self.send_response(200 if public else status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


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
    with api(status) as url, pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH") as error:
        RayJobs(url)
    assert url in str(error.value)


@pytest.mark.fault_row(43)
def test_an_api_that_answers_without_a_token_is_noticed() -> None:
    with api(200) as url:
        assert RayJobs(url).needs_token
    with api(200, mode="disabled") as url:
        assert not RayJobs(url).needs_token


def test_an_explicit_address_is_used_even_if_the_environment_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with api(200) as url, api(401) as other:
        monkeypatch.setenv("RAY_ADDRESS", other)
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", other)
        assert RayJobs(url).url == url
        with pytest.raises(ConfigError, match=other):
            RayJobs(None)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
        RayJobs(address)


def test_no_password_of_the_address_is_printed() -> None:
    with pytest.raises(TxlError) as error:
        RayJobs("http://user:CANARY@127.0.0.1:1")
    assert "CANARY" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "code", "logs", "expected"),
    [
        (JobStatus.RUNNING, None, "", ("running", None)),
        (JobStatus.SUCCEEDED, 0, "", ("done", 0)),
        (JobStatus.FAILED, 2, LOGS, ("failed", 2)),
        (JobStatus.FAILED, 75, LOGS, ("stopped", 75)),
        (JobStatus.FAILED, 127, LOGS, ("failed", 1)),
        (JobStatus.FAILED, -9, LOGS, ("failed", 1)),
        (JobStatus.FAILED, None, "", ("failed", 1)),
        (JobStatus.STOPPED, None, f"{LOGS}{EXIT_LINE}75\n", ("stopped", 75)),
        (JobStatus.STOPPED, None, f"{LOGS}{EXIT_LINE}4\n", ("stopped", 4)),
        (JobStatus.STOPPED, None, LOGS, ("stopped", 75)),
        (JobStatus.STOPPED, None, f"{EXIT_LINE}4\n{LOGS}", ("stopped", 75)),
    ],
)
def test_exit_codes(
    status: JobStatus, code: int | None, logs: str, expected: tuple[str, int | None]
) -> None:
    job = job_of(details(status, code), logs)
    assert (job.state, job.exit_code) == expected
    assert (job.start_seconds, job.end_seconds) == (1.0, 3.0)


def test_a_failed_job_has_the_last_lines_of_its_output() -> None:
    logs = "".join(f"line {number}\n" for number in range(100))
    message = job_of(
        details(JobStatus.FAILED, 3, "failed with exit code 3, logs:\nx"), logs
    ).message
    assert message.splitlines()[0] == "failed with exit code 3, logs:"
    assert message.splitlines()[-1] == "line 99"
    assert "line 10\n" not in message


# --- what is sent --------------------------------------------------------------------------------

FILES = {
    "configs/a.yaml": "a",
    "src/model.py": "m",
    "src/data/loader.py": "only data/ of the working directory is excluded",
    ".git/config": "g",
    ".venv/lib/x.py": "v",
    "src/__pycache__/model.pyc": "c",
    "runs/a/metrics.jsonl": "r",
    "data/a/manifest.json": "d",
    ".env": "PASSWORD=CANARY",
    "deploy/server.key": "CANARY",
    "home/.aws/credentials": "CANARY",
    "ignored/big.bin": "b",
    "notes/private.txt": "p",
    "notes/public.txt": "q",
    "notes/sub/private.txt": "s",
    "results/mine/x": "run directory of the config",
    ".gitignore": "ignored/\n*.log\n",
    "notes/.gitignore": "private.txt\n",
    "notes/sub/.gitignore": "!private.txt\n",
    ".rayignore": "*.ckpt\n",
    "x.log": "l",
    "x.ckpt": "k",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(project: Path, *excludes: str) -> set[str]:
    """Of the files that are sent, without the code of this project."""
    request = JobRequest(
        name="a", words=("eval",), root="/r", working_dir=project, excludes=excludes
    )
    paths = packed_files(project, excludes_of(request))
    return {path.relative_to(project).as_posix() for path in paths}


@pytest.mark.fault_row(44)
def test_code_and_configs_travel_and_nothing_else(project: Path) -> None:
    assert names(project, "/results/mine") == {
        *("configs/a.yaml", "src/model.py", "src/data/loader.py", "notes/public.txt"),
        *(".gitignore", ".rayignore", "notes/.gitignore", "notes/sub/.gitignore"),
    }
    assert not any("CANARY" in FILES[name] for name in names(project))


@pytest.mark.fault_row(45)
def test_no_link_leads_out_of_the_working_directory(project: Path, tmp_path: Path) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-outside"
    secret.mkdir()
    (secret / "file").write_text("CANARY")
    (project / "link.txt").symlink_to(secret / "file")
    (project / "folder").symlink_to(secret)
    (project / "cycle").symlink_to(project)
    (project / "configs/latest.yaml").symlink_to("a.yaml")
    os.mkfifo(project / "fifo")
    found = names(project)
    assert "configs/latest.yaml" in found
    assert not any(name.split("/")[0] in ("link.txt", "folder", "cycle", "fifo") for name in found)


def test_a_package_that_is_too_large_is_refused_with_its_largest_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_constants.DASHBOARD_CLIENT_MAX_SIZE == MAX_BYTES
    monkeypatch.setattr(jobs, "MAX_BYTES", 1000)
    (project / "large.txt").write_bytes(b"t" * 2000)
    with pytest.raises(ConfigError, match=r"Largest: large.txt \(2,000 bytes\), .*\.rayignore"):
        names(project)


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

SUBMIT = ("job", "submit", "--root", "/shared", "--working-dir", TINY.parent)
RUN = ("--", "train", TINY, "--ranks", 2)


class MemoryCluster:
    """Jobs that are plain data, in place of Ray's client."""

    mode = "token"

    def __init__(self) -> None:
        self.known: dict[str, JobDetails] = {}

    def submit_job(self, *, submission_id: str, **options: Any) -> None:
        if submission_id in self.known:
            raise RuntimeError(f"{submission_id} already exists")
        self.known[submission_id] = details(JobStatus.RUNNING).model_copy(
            update={
                "submission_id": submission_id,
                "metadata": options["metadata"],
                "start_time": 1000 * len(self.known),
            }
        )

    def end(self, job_id: str, status: JobStatus, code: int) -> None:
        update = {"status": status, "driver_exit_code": code, "message": "ConfigError: the cause"}
        self.known[job_id] = self.known[job_id].model_copy(update=update)

    def list_jobs(self) -> list[JobDetails]:
        return list(self.known.values())

    def get_job_info(self, job_id: str) -> JobDetails:
        return self.known[job_id]

    def get_job_logs(self, job_id: str) -> str:
        return f"output of {job_id}\n"

    def stop_job(self, job_id: str) -> bool:
        return self.known[job_id].status == JobStatus.RUNNING

    def _do_request(self, method: str, endpoint: str) -> Any:
        return SimpleNamespace(status_code=200, json=lambda: {"authentication_mode": self.mode})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    memory = MemoryCluster()
    monkeypatch.setattr(jobs, "_Client", lambda url: memory)
    monkeypatch.setenv("RAY_ADDRESS", "http://cluster:8265")
    return memory


def submit(cluster: MemoryCluster, *words: object) -> str:
    """Submit a run, and return the id of its newest attempt."""
    code, output = run_txl(*SUBMIT, *RUN, *words)
    assert code == 0, output
    return list(cluster.known)[-1]


def test_a_run_that_is_running_is_not_submitted_again(cluster: MemoryCluster) -> None:
    first = submit(cluster)
    code, message = run_txl(*SUBMIT, *RUN)
    assert code == 2
    assert f"already running as job {first}" in message
    assert f"txl job stop --wait {first} --address http://cluster:8265" in message
    assert list(cluster.known) == [first]


def test_follow_attaches_to_the_running_job_if_the_command_is_the_same(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit(cluster)
    code, _ = run_txl(*SUBMIT, "--follow", *RUN, "seed=5")
    assert code == 2, "another command on the same run directory"
    monkeypatch.setattr(jobs.time, "sleep", lambda _: cluster.end(first, JobStatus.SUCCEEDED, 0))
    code, output = run_txl(*SUBMIT, "--follow", *RUN)
    assert code == 0
    assert f"output of {first}" in output
    assert list(cluster.known) == [first]


def test_attempts_are_numbered_and_found_by_the_name_of_the_run(cluster: MemoryCluster) -> None:
    for _ in range(11):
        newest = submit(cluster)
        cluster.end(newest, JobStatus.SUCCEEDED, 0)
    run = newest.removesuffix("-11")
    assert list(cluster.known) == [f"{run}-{number}" for number in range(1, 12)]
    for word, job_id in ((run, newest), (run.rpartition("-")[0], newest), (f"{run}-9", f"{run}-9")):
        assert json.loads(run_txl("job", "status", word, "--json")[1])["id"] == job_id
    submit(cluster, "directory=b/tiny")
    code, message = run_txl("job", "logs", "txl-train-tiny")
    assert (code, run in message) == (2, True)
    assert "txl job list --address" in run_txl("job", "logs", "txl-train-other")[1]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 75])
def test_the_exit_code_is_that_of_the_command(cluster: MemoryCluster, code: int) -> None:
    job_id = submit(cluster)
    cluster.end(job_id, JobStatus.FAILED, code)
    assert run_txl("job", "logs", "--follow", job_id)[0] == code
    ended, output = run_txl("job", "status", job_id)
    assert ended == 0
    if code != 75:
        assert f"output of {job_id}" in output
        assert f"txl job logs {job_id} --address http://cluster:8265" in output


def test_with_json_only_the_job_is_on_standard_output(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(seconds: float) -> None:
        cluster.end(next(iter(cluster.known)), JobStatus.SUCCEEDED, 0)

    monkeypatch.setattr(jobs.time, "sleep", end)
    ended = CliRunner().invoke(app, [str(word) for word in (*SUBMIT, "--follow", "--json", *RUN)])
    (job_id,) = cluster.known
    assert json.loads(ended.stdout)["id"] == job_id
    assert f"output of {job_id}" in ended.stderr
    assert job_id in run_txl("job", "list")[1]
    (listed,) = json.loads(run_txl("job", "list", "--json")[1])["jobs"]
    assert (listed["id"], listed["state"], listed["exit_code"]) == (job_id, "done", 0)


def test_ctrl_c_leaves_the_job_running_and_says_how_to_stop_it(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.time, "sleep", interrupt)
    code, output = run_txl(*SUBMIT, "--follow", *RUN)
    (job_id,) = cluster.known
    assert code == 130
    assert f"txl job stop {job_id}" in output
    assert cluster.known[job_id].status == JobStatus.RUNNING


def test_a_dry_run_contacts_no_cluster() -> None:
    code, output = run_txl(*SUBMIT, "--dry-run", *RUN)
    assert code == 0
    assert "exec python -P -m cluster.job_driver --root /shared" in output
    code, output = run_txl("job", "submit", "--dry-run", "--", "train", TINY, "--rankz", 2)
    assert (code, "No such option: --rankz" in output) == (2, True)
    code, output = run_txl(*SUBMIT, "--dry-run", "--env", "A", *RUN)
    assert (code, output) == (2, "--env A: write NAME=VALUE")


@pytest.mark.fault_row(43)
def test_an_api_without_a_token_is_reported(cluster: MemoryCluster) -> None:
    cluster.mode = "disabled"
    _, output = run_txl("job", "list")
    assert "accepts jobs without a token" in output
    assert "no txl jobs" in output
