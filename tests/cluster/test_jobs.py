"""RayJobs without a cluster: servers that refuse or do not respond, exit codes, Ray's limits."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from ray._private import ray_constants
from ray.job_submission import JobDetails, JobStatus, JobType

from cluster.jobs import RayJobs, _job_of
from txl_dist.errors import ConfigError, TxlError
from txl_dist.launch.job_package import MAX_BYTES
from txl_dist.launch.jobs import EXIT_LINE

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
