"""RayJobs: the client of a cluster's Ray Jobs API (entry point `ray` of group txl.jobs).

    txl job submit -> RayJobs.submit -> dashboard on the head node -> JobSupervisor (an actor)
                   -> shell -> cluster/job_driver.py -> txl train --on auto

Ray's stop request is SIGTERM to the driver and all its child processes, and SIGKILL after
RAY_JOB_STOP_WAIT_TIME_S, 3 seconds by default. The supervisor reads that variable in its own
environment, which is the job's: so every job sets it to the time that its command may take to end.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.job_submission import JobStatus, JobSubmissionClient, JobType

from cluster.connection import check_cluster
from data_pipeline.system.sources import shown
from txl_dist.config.redaction import redact
from txl_dist.errors import ConfigError, PreemptedError, TxlError
from txl_dist.launch.jobs import EXIT_LINE, Job, JobExistsError, JobRequest, JobState

REQUEST_SECONDS = 60.0
"""Time limit for a response of the API; Ray's client has none."""
POLL_SECONDS = 2.0
SILENCE_SECONDS = 15.0
"""While a job prints nothing, its state is checked this often: the head may have died."""
HEAD_SECONDS = 30.0
"""How long the API may be unreachable while a job is followed."""
NUM_LAST_LINES = 40
"""Lines that are kept of the output of a failed job."""
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
    """The txl jobs of one cluster."""

    def __init__(self, address: str | None) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        address = address or next(filter(None, map(os.environ.get, _ADDRESS_VARIABLES)), "auto")
        with _without_address_variables():
            url = _api_url(address)
            self.url = shown(url)
            with self._explained("it cannot be used", unreachable=ConfigError):
                self._client = _Client(url)

    @property
    def needs_token(self) -> bool:
        with self._explained("it does not tell whether it requires a token"):
            response = self._client._do_request("GET", "/api/authentication_mode")
            return response.status_code != 200 or (
                response.json().get("authentication_mode") != "disabled"
            )

    def submit(self, request: JobRequest, job_id: str, package: Path) -> None:
        environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(request.stop_seconds), **request.environment}
        with self._explained(f"job {job_id} could not be submitted"):
            self._client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=job_id,
                runtime_env={"working_dir": str(package), "env_vars": environment},
                metadata={"txl.command": request.command},
            )

    def jobs(self) -> list[Job]:
        with self._explained("its jobs cannot be listed"):
            details = self._client.list_jobs()
        jobs = map(_job_of, filter(_is_txl_job, details))
        return sorted(jobs, key=lambda job: job.start_seconds or 0)

    def job(self, job_id: str) -> Job:
        with self._explained(f"job {job_id} cannot be found"):
            details = self._client.get_job_info(job_id)
        logs = ""
        if details.status in (JobStatus.FAILED, JobStatus.STOPPED):
            with suppress(TxlError):  # the node of the driver is gone, with its log
                logs = self.logs(job_id)
        return _job_of(details, logs)

    def logs(self, job_id: str) -> str:
        with self._explained(f"the output of job {job_id} cannot be read"):
            return str(self._client.get_job_logs(job_id))

    def wait(self, job_id: str) -> Job:
        while not (job := self._job_if_reachable(job_id)).is_ended:
            time.sleep(POLL_SECONDS)
        return job

    def follow(self, job_id: str, write: Callable[[str], object]) -> Job:
        return asyncio.run(self._follow(job_id, write))

    def stop(self, job_id: str) -> bool:
        with self._explained(f"job {job_id} could not be stopped"):
            return bool(self._client.stop_job(job_id))

    async def _follow(self, job_id: str, write: Callable[[str], object]) -> Job:
        num_written = 0
        while True:
            # A new connection sends the output from its beginning.
            num_read = 0
            async for text in self._tail(job_id):
                if unwritten := text[max(0, num_written - num_read) :]:
                    write(unwritten)
                num_read += len(text)
                num_written = max(num_written, num_read)
            job = await asyncio.to_thread(self._job_if_reachable, job_id)
            if job.is_ended:
                if num_written == 0:  # the driver has not run
                    write(f"{job.message}\n")
                return job
            await asyncio.sleep(POLL_SECONDS)

    async def _tail(self, job_id: str) -> AsyncIterator[str]:
        """The output from its beginning, until the job ends or the connection is lost."""
        tail = self._client.tail_job_logs(job_id)
        next_text = asyncio.ensure_future(anext(tail))
        try:
            while True:
                done, _ = await asyncio.wait([next_text], timeout=SILENCE_SECONDS)
                if not done:  # the connection has no time limit
                    job = await asyncio.to_thread(self._job_if_reachable, job_id)
                    if job.is_ended:
                        return
                    continue
                try:
                    text = next_text.result()
                except Exception:  # the end, or an error of aiohttp: the caller checks the job
                    return
                yield text
                next_text = asyncio.ensure_future(anext(tail))
        finally:
            next_text.cancel()

    def _job_if_reachable(self, job_id: str) -> Job:
        """The job; waits HEAD_SECONDS for an API that does not respond."""
        deadline = time.monotonic() + HEAD_SECONDS
        while True:
            try:
                return self.job(job_id)
            except ConfigError:
                raise
            except TxlError as error:
                if time.monotonic() > deadline:
                    raise TxlError(
                        f"{error}. If the head node has failed, its jobs have ended; start the "
                        "cluster again and submit the same command: it resumes"
                    ) from None
                time.sleep(POLL_SECONDS)

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
                f"no Ray cluster responds at {self.url}: {_first_line(error)}. Check that it runs "
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
            raise TxlError(f"{self.url}: {failure}: {_last_line(error)}") from None


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
            f"the Ray cluster at --address {address} has no Jobs API: {_first_line(error)}. Start "
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


def _first_line(error: Exception) -> str:
    """Without the password that the address may have."""
    return redact(next(iter(str(error).splitlines()), type(error).__name__)).rstrip(".")


def _last_line(error: Exception) -> str:
    """The server sends its whole traceback."""
    return redact(next(reversed(str(error).strip().splitlines()), type(error).__name__)).rstrip(".")
