"""`txl job` against a cluster in memory: attempts, attaching, exit codes, output."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.support.commands import run_txl
from tests.support.training_runs import TINY
from tests.txl_dist.cli.test_job_request import job
from txl_dist.cli import job_request
from txl_dist.cli.app import app
from txl_dist.cli.job_request import Job, JobExistsError, JobRequest

SUBMIT = ("job", "submit", "--root", "/shared", "--working-dir", TINY.parent)
RUN = ("--", "train", TINY, "--ranks", 2)


class MemoryCluster:
    """Jobs that are plain data, in place of `cluster.jobs.RayJobs`."""

    url, needs_token = "http://cluster:8265", True

    def __init__(self) -> None:
        self.known: dict[str, Job] = {}
        self.ends_as: Job = job("", "done")

    def __call__(self, address: str | None) -> "MemoryCluster":
        """Instead of the class of a client."""
        return self

    @staticmethod
    def package(request: JobRequest) -> dict[str, int]:
        return {}

    def submit(self, request: JobRequest, job_id: str) -> None:
        if job_id in self.known:
            raise JobExistsError(job_id)
        self.known[job_id] = replace(job(job_id, "running"), command=request.command)

    def jobs(self) -> list[Job]:
        return list(self.known.values())

    def job(self, job_id: str) -> Job:
        return self.known[job_id]

    def logs(self, job_id: str) -> str:
        return f"output of {job_id}\n"

    def wait(self, job_id: str, write: Callable[[str], object] = len) -> Job:
        write(self.logs(job_id))
        end = self.ends_as
        self.known[job_id] = replace(
            self.known[job_id], state=end.state, exit_code=end.exit_code, message=end.message
        )
        return self.known[job_id]

    def stop(self, job_id: str) -> bool:
        return not self.known[job_id].is_ended


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    memory = MemoryCluster()
    monkeypatch.setattr(job_request, "client_class", lambda: memory)
    return memory


def test_a_run_that_is_running_is_not_submitted_again(cluster: MemoryCluster) -> None:
    code, output = run_txl(*SUBMIT, *RUN)
    assert code == 0
    (first,) = cluster.known
    assert first in output
    code, message = run_txl(*SUBMIT, *RUN)
    assert code == 2
    assert f"already running as job {first}" in message
    assert f"txl job stop --wait {first}" in message
    assert len(cluster.known) == 1


def test_follow_attaches_to_the_running_job_if_the_command_is_the_same(
    cluster: MemoryCluster,
) -> None:
    run_txl(*SUBMIT, *RUN)
    (first,) = cluster.known
    code, output = run_txl(*SUBMIT, "--follow", *RUN, "seed=5")
    assert code == 2, "another command on the same run directory"
    code, output = run_txl(*SUBMIT, "--follow", *RUN)
    assert code == 0
    assert f"output of {first}" in output
    assert len(cluster.known) == 1


def test_after_the_end_the_run_is_submitted_as_the_next_attempt(cluster: MemoryCluster) -> None:
    for _ in range(3):
        run_txl(*SUBMIT, "--follow", *RUN)
    numbers = [job_id.rpartition("-")[2] for job_id in cluster.known]
    assert numbers == ["1", "2", "3"]


def test_a_submission_that_loses_a_race_finds_the_winner(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_txl(*SUBMIT, *RUN)
    monkeypatch.setattr(cluster, "jobs", list)  # the list was read before the other submission
    code, message = run_txl(*SUBMIT, *RUN)
    assert code == 2
    assert "already running as job" in message


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 75])
def test_the_exit_code_is_that_of_the_command(cluster: MemoryCluster, code: int) -> None:
    state = "stopped" if code == 75 else "failed"
    cluster.ends_as = replace(job("", state), exit_code=code, message="ConfigError: the cause")
    assert run_txl(*SUBMIT, "--follow", *RUN)[0] == code
    (job_id,) = cluster.known
    assert run_txl("job", "logs", "--follow", job_id)[0] == code
    assert run_txl("job", "status", job_id)[0] == 0


def test_with_json_only_the_job_is_on_standard_output(cluster: MemoryCluster) -> None:
    words = [str(word) for word in (*SUBMIT, "--follow", "--json", *RUN)]
    ended = CliRunner().invoke(app, words)
    (job_id,) = cluster.known
    assert json.loads(ended.stdout)["id"] == job_id
    assert f"output of {job_id}" in ended.stderr


def test_ctrl_c_leaves_the_job_running_and_says_how_to_stop_it(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(job_id: str, write: Callable[[str], object]) -> Job:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "wait", interrupted)
    code, output = run_txl(*SUBMIT, "--follow", *RUN)
    (job_id,) = cluster.known
    assert code == 130
    assert f"txl job stop {job_id}" in output
    assert cluster.known[job_id].state == "running"


def test_a_job_is_found_by_its_name_without_the_number(cluster: MemoryCluster) -> None:
    for _ in range(2):
        run_txl(*SUBMIT, "--follow", *RUN)
    newest = max(cluster.known)
    name = newest.rpartition("-")[0]
    _, output = run_txl("job", "status", name, "--json")
    assert json.loads(output)["id"] == newest
    code, message = run_txl("job", "logs", "txl-train-other")
    assert code == 2
    assert f"txl job list --address {cluster.url}" in message


def test_a_job_is_found_without_the_digest_if_only_one_run_has_the_name(
    cluster: MemoryCluster,
) -> None:
    run_txl(*SUBMIT, "--follow", *RUN, "directory=a/run")
    (first,) = cluster.known
    assert run_txl("job", "logs", "txl-train-run") == (0, f"output of {first}\n")
    run_txl(*SUBMIT, "--follow", *RUN, "directory=b/run")
    code, message = run_txl("job", "logs", "txl-train-run")
    assert code == 2
    assert all(job_id.rpartition("-")[0] in message for job_id in cluster.known)


def test_the_status_of_a_failed_job_has_the_error_and_the_command_for_its_log(
    cluster: MemoryCluster,
) -> None:
    cluster.ends_as = replace(job("", "failed"), exit_code=3, message="DataError: the cause")
    run_txl(*SUBMIT, "--follow", *RUN)
    (job_id,) = cluster.known
    _, output = run_txl("job", "status", job_id)
    assert "DataError: the cause" in output
    assert f"txl job logs {job_id} --address {cluster.url}" in output


def test_list_prints_every_job(cluster: MemoryCluster) -> None:
    assert "no txl jobs" in run_txl("job", "list")[1]
    run_txl(*SUBMIT, "--follow", *RUN)
    (job_id,) = cluster.known
    assert job_id in run_txl("job", "list")[1]
    (listed,) = json.loads(run_txl("job", "list", "--json")[1])["jobs"]
    assert (listed["id"], listed["state"], listed["exit_code"]) == (job_id, "done", 0)


def test_a_dry_run_contacts_no_cluster(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: MemoryCluster, address: str | None) -> None:
        raise AssertionError

    monkeypatch.setattr(MemoryCluster, "__call__", refuse)
    code, output = run_txl(*SUBMIT, "--dry-run", *RUN)
    assert code == 0
    assert "package: " in output
    assert "exec python -P -m cluster.job_driver --root /shared" in output


@pytest.mark.fault_row(43)
def test_an_api_without_a_token_is_reported(cluster: MemoryCluster) -> None:
    cluster.needs_token = False
    _, output = run_txl("job", "list")
    assert "accepts jobs without a token" in output


def test_a_missing_value_of_an_environment_variable_is_refused() -> None:
    code, message = run_txl(*SUBMIT, "--dry-run", "--env", "A", *RUN)
    assert (code, message) == (2, "--env A: write NAME=VALUE")
