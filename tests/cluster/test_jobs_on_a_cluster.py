"""`txl job` against a real head with a token: submit, follow, stop, resume; a head that dies."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import num_lines, output_of, wait_until
from tests.support.nodes import JobsHead
from tests.support.training_runs import NO_EVALUATION, TINY, losses, saved_last_step
from txl_dist.runtime.waiting import Heartbeat

pytestmark = pytest.mark.cluster

NUM_STEPS = 2000
LONG = (NO_EVALUATION, f"training.num_steps={NUM_STEPS}", "training.checkpoint_interval_steps=50")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobsHead]:
    head = JobsHead(tmp_path_factory.mktemp("head"))
    with head.running():
        yield head


def submission(root: Path, *options: object) -> tuple[object, ...]:
    """`submit` of a command; relative paths begin at `root`."""
    return ("submit", "--root", root, "--python", sys.executable, *options, "--")


def training(dataset: Path, *settings: object) -> tuple[object, ...]:
    return ("train", TINY, "--ranks", 2, f"data.path={dataset}", "directory=runs/a", *settings)


def final_hashes(run: Path) -> dict[str, str]:
    """Hashes of all tensors of the last checkpoint: weights, optimizer state, memory."""
    path = run / "checkpoints" / f"step-{NUM_STEPS:08d}" / "manifest.json"
    files = json.loads(path.read_text())["files"]
    hashes = {name: files[name]["sha256"] for name in files if name.endswith(".safetensors")}
    assert hashes
    return hashes


@pytest.mark.fault_row(5, 35)
def test_follow_detach_stop_and_resume_to_the_result_of_an_undisturbed_run(
    head: JobsHead, dataset: Path, straight: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "runs/a"
    command = training(dataset, *LONG)
    submit = (*submission(tmp_path, "--follow"), *command)
    follower = head.start(*submit)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 60, timeout_seconds=180)
    assert follower.stdout is not None
    shown: list[str] = []
    while not (shown and re.search(r"step \d+ \| loss ", shown[-1])):
        shown.append(next(follower.stdout))  # the log of a job arrives after a while
    follower.send_signal(signal.SIGINT)
    output = "".join(shown) + follower.communicate(timeout=60)[0]
    assert follower.returncode == 130, output
    (job_id,) = set(re.findall(r"txl job stop (\S+)", output))

    code, output = head.txl(*submit)
    assert code == 2, output
    assert "another run" in output

    code, output = head.txl("stop", "--wait", job_id)
    assert code == 0, output
    assert "stopped, exit code 75" in output
    code, output = head.txl("logs", "--follow", job_id)
    assert code == 75, output
    assert json.loads(head.txl("status", "--json", job_id)[1])["exit_code"] == 75
    assert 50 < saved_last_step(run) < NUM_STEPS
    code, log = head.txl("logs", job_id)
    assert "stopping after this step, then saving" in log

    code, output = head.txl(*submit)
    assert code == 0, output
    assert "resuming at step" in output
    assert "done: runs/a" in output
    assert losses(run) == losses(straight(*LONG))
    assert final_hashes(run) == final_hashes(straight(*LONG))

    code, output = head.txl("list", "--json")
    states = [job["state"] for job in json.loads(output)["jobs"]]
    assert states[-3:] == ["stopped", "failed", "succeeded"]


@pytest.mark.fault_row(44)
def test_failures_come_back_with_exit_code_and_the_log_of_the_rank(
    head: JobsHead, dataset: Path, tmp_path: Path
) -> None:
    command = training(dataset)
    # Fewer lanes than ranks: noticed where the data is.
    submit = submission(tmp_path, "--follow")
    code, output = head.txl(*submit, *command, "data.num_lanes=1")
    assert code == 2, output
    assert "ConfigError" in output

    follower = head.start(*submit, *command, *LONG, "--max-restarts", 0)
    beat = tmp_path / "runs/a/.heartbeats/rank-0.json"
    wait_until(beat.exists, timeout_seconds=180)
    os.kill(Heartbeat.model_validate_json(beat.read_bytes()).pid, signal.SIGKILL)
    output = output_of(follower, 1, timeout_seconds=120)
    assert re.search(r"rank [01] \(node 127\.0\.0\.1, pid \d+\).* died", output)
    assert "Logs of all ranks: runs/a/logs" in output


def test_prepare_and_evaluate_as_jobs(
    head: JobsHead, dataset: Path, straight: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt").write_text("It was a dark and stormy night.\n" * 100)
    submit = submission(tmp_path, "--follow")
    code, output = head.txl(*submit, "prepare", "books", "--out", "data/books", "--workers", 2)
    assert code == 0, output
    assert (tmp_path / "data/books/manifest.json").exists()
    code, output = head.txl(*submit, "eval", straight(*LONG), dataset, "--json", "--workers", 2)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith('{"')]
    assert json.loads(line)["tokens_scored"] > 0
    code, output = head.txl(*submit, "eval", tmp_path / "missing", dataset)
    assert code == 4, output


@pytest.mark.fault_row(43)
def test_without_the_right_token_nothing_is_submitted(head: JobsHead, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("f" * 64)
    for environment in (
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_TOKEN_PATH": str(wrong)},
        {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")},
    ):
        code, output = head.txl("list", **environment)
        assert code == 2, output
        assert "RAY_AUTH_TOKEN_PATH" in output
        assert "Traceback" not in output


@pytest.mark.fault_row(4)
def test_after_the_head_died_the_same_command_resumes(
    dataset: Path, straight: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "runs/a"
    submit = submission(tmp_path, "--follow")
    command = training(dataset, *LONG)
    head = JobsHead(tmp_path)
    with head.running() as node:
        follower = head.start(*submit, *command)
        wait_until(lambda: num_lines(run / "metrics.jsonl") > 120, timeout_seconds=180)
        node.kill()
        output, _ = follower.communicate(timeout=120)
    assert follower.returncode == 1, output
    assert "submit the same command: it resumes" in output
    assert "Traceback" not in output
    with head.running():
        code, output = head.txl(*submit, *command)
    assert code == 0, output
    assert "resuming at step" in output
    assert losses(run) == losses(straight(*LONG))
    assert final_hashes(run) == final_hashes(straight(*LONG))
