"""Jobs: the shell command of a job, and the numbers of attempts."""

import shlex
import subprocess

import pytest

from txl_dist.launch.jobs import Job, JobRequest, JobState, attempts_of, next_attempt_id

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


def job(job_id: str, state: JobState = "done") -> Job:
    return Job(
        id=job_id,
        state=state,
        exit_code=0 if state == "done" else None,
        message="",
        command="txl train a.yaml",
        start_seconds=0.0,
        end_seconds=1.0,
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


def test_the_id_of_an_attempt_is_never_used_again() -> None:
    names = ["txl-a-1", "txl-a-10", "txl-a-9", "txl-a-b-3", "txl-b-2"]
    jobs = [job(name) for name in names]
    attempts = attempts_of("txl-a", jobs)
    assert [attempt.id for attempt in attempts] == ["txl-a-1", "txl-a-9", "txl-a-10"]
    assert next_attempt_id("txl-a", attempts) == "txl-a-11"
    assert next_attempt_id("txl-c", attempts_of("txl-c", jobs)) == "txl-c-1"
    assert [attempt.id for attempt in attempts_of("txl-a-9", jobs)] == ["txl-a-9"]
