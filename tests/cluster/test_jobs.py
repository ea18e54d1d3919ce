"""RayJobs without a cluster: servers that refuse or do not respond, exit codes, Ray's limits."""

import json
import os
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

import pytest
from ray._private import ray_constants
from ray.job_submission import JobDetails, JobStatus, JobType

from cluster.jobs import RayJobs, _code, _job_of
from txl_dist.cli.job_request import EXIT_LINE, MAX_BYTES, JobRequest, require_size
from txl_dist.errors import ConfigError, TxlError

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
    job = _job_of(details(status, code), logs)
    assert (job.state, job.exit_code) == expected
    assert (job.start_seconds, job.end_seconds) == (1.0, 3.0)


def test_a_failed_job_has_the_last_lines_of_its_output() -> None:
    logs = "".join(f"line {number}\n" for number in range(100))
    message = _job_of(
        details(JobStatus.FAILED, 3, "failed with exit code 3, logs:\nx"), logs
    ).message
    assert message.splitlines()[0] == "failed with exit code 3, logs:"
    assert message.splitlines()[-1] == "line 99"
    assert "line 10\n" not in message


def test_the_limit_of_a_package_is_that_of_this_version_of_ray() -> None:
    assert ray_constants.DASHBOARD_CLIENT_MAX_SIZE == MAX_BYTES


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
    return {name for name in RayJobs.package(request) if name.split("/")[0] not in CODE}


@pytest.mark.fault_row(44)
def test_code_and_configs_travel_and_nothing_else(project: Path) -> None:
    assert names(project, "/results/mine") == {
        *("configs/a.yaml", "src/model.py", "src/data/loader.py", "notes/public.txt"),
        *(".gitignore", ".rayignore", "notes/.gitignore", "notes/sub/.gitignore"),
    }
    assert not any("CANARY" in FILES[name] for name in names(project))


def test_patterns_of_the_user_are_left_out(project: Path) -> None:
    found = names(project, "notes", "*.py")
    assert "configs/a.yaml" in found
    assert not any(name.startswith("notes") or name.endswith(".py") for name in found)


def test_a_config_that_would_not_be_sent_is_refused(project: Path) -> None:
    request = JobRequest(
        name="a", words=("train",), root="/r", working_dir=project, config="ignored/big.bin"
    )
    with pytest.raises(ConfigError, match=r"big.bin would not be sent: a pattern of .gitignore"):
        RayJobs.package(request)


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


def test_a_package_that_is_too_large_is_refused_with_its_largest_entries(project: Path) -> None:
    (project / "weights").mkdir()
    for number in range(3):
        (project / f"weights/{number}.bin").write_bytes(b"w" * 1_000_000)
    (project / "large.txt").write_bytes(b"t" * 2_000_000)
    request = JobRequest(name="a", words=("eval",), root="/r", working_dir=project)
    sizes = RayJobs.package(request)
    require_size(sizes)
    with pytest.raises(ConfigError, match=r"weights/ \(2\.9 MiB\), .*large.txt \(1\.9 MiB\)"):
        require_size(sizes, 1_000_000)


@pytest.mark.slow
def test_the_code_that_is_sent_runs_where_this_project_is_not_installed(tmp_path: Path) -> None:
    folders = []
    for module in _code(tmp_path):  # Ray unpacks each into a folder of its own
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
