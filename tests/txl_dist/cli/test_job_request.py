"""Jobs: checks before anything is uploaded, names, numbers of attempts, the shell command."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import run_txl
from tests.support.training_runs import TINY
from txl_dist.cli.job_request import (
    SHUTDOWN_SECONDS,
    Job,
    JobRequest,
    JobState,
    attempts_of,
    next_attempt_id,
    plan_job,
)
from txl_dist.errors import ConfigError

TRAIN = ("train", str(TINY), "--ranks", "2", "seed=4")


def plan(*words: str, root: str = "/shared", **environment: str) -> JobRequest:
    return plan_job(
        words, root=root, working_dir=TINY.parents[1], environment=environment, python="python"
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
    books = name("prepare", "books/", "--out", "data/books")
    assert books.startswith("txl-prepare-books-")
    assert name("prepare", "more/", "--out", "/shared/data/books", "--workers", "9") == books
    assert name("eval", "runs/a", "data/a") == name("eval", "runs/a", "data/a")
    assert name("eval", "runs/a", "data/a") != name("eval", "runs/b", "data/a")


def test_the_command_runs_on_the_cluster_with_the_config_of_the_package() -> None:
    request = plan("train", "--ranks", "2", str(TINY), "seed=4")
    assert request.words == (
        *("train", "configs/tiny.yaml", "--on", "auto", "--ranks", "2", "seed=4"),
    )
    assert request.stop_seconds == 25 + SHUTDOWN_SECONDS
    assert plan(*TRAIN, "training.grace_seconds=99.5").stop_seconds == 100 + SHUTDOWN_SECONDS
    assert plan("eval", "a", "b").words == ("eval", "--on", "auto", "a", "b")


def test_the_run_directory_and_the_data_stay_here() -> None:
    request = plan(*TRAIN, "evaluation.path=data/other")
    assert request.excludes == ("/runs/tiny", "/data/tiny", "/data/other")
    assert request.config == "configs/tiny.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "data"), "'bench' cannot be a job"),
        (("train", str(TINY), "--on", "ray"), "--on is not an option"),
        (("prepare", "a", "--out", "b", "--on=local"), "--on is not an option"),
        (("train", str(TINY), "model.d_modle=4"), "did you mean"),
        (("train", "/etc/passwd"), "/etc/passwd"),
    ],
)
def test_an_invalid_command_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*words)


def test_a_config_outside_the_working_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TINY.read_text())
    with pytest.raises(ConfigError, match="--working-dir"):
        plan("train", str(tmp_path / "run.yaml"))


def test_a_relative_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute path on the cluster"):
        plan(*TRAIN, root="shared")


def test_a_wrong_option_is_refused_with_the_usage_of_the_command() -> None:
    code, output = run_txl("job", "submit", "--dry-run", "--", "train", TINY, "--rankz", 2)
    assert code == 2
    assert "No such option: --rankz" in output


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
        plan_job(
            ("train", str(tmp_path / "run.yaml")),
            root="/r",
            working_dir=tmp_path,
            environment={},
            python="python",
        )
    assert "CANARY" not in str(error.value)


@pytest.mark.fault_row(44)
@pytest.mark.parametrize(
    "variable",
    ["AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "RAY_AUTH_TOKEN", "apiKey"],
)
def test_a_secret_environment_variable_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match="a secret") as error:
        plan(*TRAIN, **{variable: "CANARY"})
    assert "CANARY" not in str(error.value)
    assert plan(*TRAIN, OMP_NUM_THREADS="2").environment == {"OMP_NUM_THREADS": "2"}


def test_the_key_of_a_text_is_not_a_secret() -> None:
    assert name("prepare", "a.jsonl", "--text-key=content", "--out", "b")


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
