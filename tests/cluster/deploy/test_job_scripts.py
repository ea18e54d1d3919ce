"""The job scripts slurm.sh, slurm_ray.sh and ranks.sh: signals, exit codes, requeues.

Programs of the test replace Slurm's and Ray's, except in the tests of a real Slurm and a real Ray.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.deploy.jobs import ALONE, ROOT, require_namespaces, start_job
from tests.support.commands import num_lines, wait_until
from tests.support.slurm import Slurm, slurm_cluster
from tests.support.training_runs import (
    NO_EVALUATION,
    TINY,
    losses,
    saved_last_step,
)

DEPLOY = ROOT / "cluster" / "deploy"
JOB_ID = str(10_000 + os.getpid() % 10_000)
SHUTDOWN_SECONDS = 20
"""How long the driver and Ray may take to end once the ranks have saved (launch/supervise.py)."""
SCONTROL = """
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >"$RECORDS/requeued" ;;
esac
"""
SRUN = """# Start the task of this host.
env | grep ^SLURM_EXPORT_ENV= >"$RECORDS/exported"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
EXPORTED = "SLURM_EXPORT_ENV=ALL\n"
RAY = """# symmetric-run, on the head node: record how it was called and run the command after `--`.
env | grep ^RAY_ | sort >"$RECORDS/environment"
stat --format=%a "$RAY_AUTH_TOKEN_PATH" >"$RECORDS/mode"
echo "$@" >"$RECORDS/ray"
[[ -n ${HEAD_FAILS:-} ]] && exit 0
[[ -n ${HEAD_WAITS:-} ]] && exec sleep 60
while [[ $1 != -- ]]; do shift; done
shift
"$@"
exit 0  # the script must not depend on this code
"""
DRIVER = """
case "$*" in
    *secrets*) echo -n 0123456789abcdef ;;
    *"config show"*) echo "directory: $RUN" ;;
    *train*)
        save() { touch "$RECORDS/stopped"; echo step-00000020 >"$RUN/LATEST"; exit 75; }
        trap save USR1
        touch "$RECORDS/started"
        [[ -n ${EXIT_CODE:-} ]] && exit "$EXIT_CODE"
        while true; do sleep 0.02; done ;;
esac
"""
RANK = """# One rank: record its variables, and end as told.
ranks="$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"
echo "$ranks $MASTER_ADDR:$MASTER_PORT $*" >>"$RECORDS/ranks"
trap 'echo "$RANK" >>"$RECORDS/stopped"; exit 75' TERM
[[ $RANK == "${FAILING_RANK:-}" ]] && exit "$EXIT_CODE"
[[ -n ${WAITS:-} ]] && while true; do sleep 0.02; done
exit 0
"""


@dataclass
class Job:
    """A script, as a process in the environment of a job."""

    process: subprocess.Popen[str]
    records: Path
    """What the programs of the test have recorded."""

    def finish(self, *, timeout_seconds: float = 60) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_seconds)
        return self.process.returncode, output

    @property
    def is_requeued(self) -> bool:
        return (self.records / "requeued").exists()


def submit(
    script: str,
    tmp_path: Path,
    *words: object,
    prefix: tuple[str, ...] = (),
    cwd: Path = ROOT,
    programs: dict[str, str] | None = None,
    **environment: str,
) -> Job:
    """Start a script by `prefix`, with `programs` in front of the PATH."""
    directory, records = tmp_path / "bin", tmp_path / "records"
    for path in (directory, records, tmp_path / "run"):
        path.mkdir(exist_ok=True)
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, **(programs or {})}.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}")
        (directory / name).chmod(0o755)
    has_python = "python" in (programs or {})
    variables = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "RECORDS": str(records),
        "RUN": str(tmp_path / "run"),
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NODELIST": "host[1-2]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_ON_NODE": "2",
        "TXL_PYTHON": str(directory / "python") if has_python else sys.executable,
    }
    process = start_job(
        [*prefix, str(DEPLOY / script), *map(str, words)], {**variables, **environment}, cwd=cwd
    )
    return Job(process, records)


# --- both scripts for Slurm -----------------------------------------------------------------------


@pytest.mark.parametrize("script", ["slurm.sh", "slurm_ray.sh"])
@pytest.mark.parametrize("place", ["work/.venv/bin", "bin"])
def test_the_python_is_that_of_the_directory_or_of_the_activated_environment(
    script: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    python = tmp_path / place / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/bash\necho this python $* >&2; exit 2\n")
    python.chmod(0o755)
    job = submit(script, tmp_path, "small.yaml", cwd=tmp_path / "work", TXL_PYTHON="")
    # An invalid config ends the job with its exit code.
    assert job.finish() == (2, "this python -m txl_dist config show small.yaml\n")
    assert not job.is_requeued


@pytest.mark.parametrize(
    ("script", "signals", "reserve_seconds"),
    [("slurm.sh", "USR1", 1), ("slurm_ray.sh", "B:USR1", SHUTDOWN_SECONDS)],
)
def test_the_ranks_end_before_slurm_kills_them(
    script: str, signals: str, reserve_seconds: int
) -> None:
    text = (DEPLOY / script).read_text()
    notice = re.search(rf"^#SBATCH --signal={signals}@(\d+)$", text, re.MULTILINE)
    grace = re.search(r"^grace_seconds=(\d+)$", text, re.MULTILINE)
    assert notice is not None
    assert grace is not None
    assert int(grace[1]) + reserve_seconds <= int(notice[1])


# --- slurm.sh -------------------------------------------------------------------------------------


def test_without_a_newer_checkpoint_the_job_is_not_requeued(dataset: Path, tmp_path: Path) -> None:
    words = (TINY, f"data.path={dataset}", f"directory={tmp_path / 'run'}")
    programs = {"srun": f"{SRUN.partition('while')[0]}exit 75"}
    job = submit("slurm.sh", tmp_path, *words, programs=programs, SLURM_EXPORT_ENV="NONE")
    code, output = job.finish()
    assert code == 75, output
    assert (job.records / "exported").read_text() == EXPORTED, "variables do not reach the tasks"
    assert "stopped without a new checkpoint" in output
    assert not job.is_requeued


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.mark.cluster
def test_a_signalled_job_saves_is_requeued_and_ends_as_an_undisturbed_one(
    slurm: Slurm, straight: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    settings = (NO_EVALUATION, "training.num_steps=300", "training.checkpoint_interval_steps=1000")
    words = (f"data.path={dataset}", f"directory={run}", *settings)
    # From the root of the repository, as its README says.
    where = (f"--chdir={ROOT}", f"--output={output}")
    one_rank_per_node = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
    job_id = slurm.submit(*one_rank_per_node, *where, DEPLOY / "slurm.sh", TINY, *words)
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 10)
    slurm.call("scancel", "--signal=USR1", job_id)  # as before the time limit
    wait_until(lambda: slurm.job(job_id)["Restarts"] == "1", timeout_seconds=60, poll_seconds=1)
    saved = [int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    assert 10 < saved[0] < 300  # only the stop request saved

    ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
    wait_until(lambda: slurm.job(job_id)["JobState"] in ended, timeout_seconds=120, poll_seconds=1)
    job, text = slurm.job(job_id), output.read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert f"resuming at step {saved[0]} " in text
    assert losses(run) == losses(straight(*settings))


# --- slurm_ray.sh ---------------------------------------------------------------------------------


def submit_driver(tmp_path: Path, **environment: str) -> Job:
    programs = {"ray": RAY, "python": DRIVER}
    return submit("slurm_ray.sh", tmp_path, "config.yaml", programs=programs, **environment)


def test_ray_requires_the_token_of_this_job_and_waits_for_all_hosts(tmp_path: Path) -> None:
    job = submit_driver(
        tmp_path, EXIT_CODE="0", SLURM_JOB_NUM_NODES="4", SLURM_GPUS_ON_NODE="8",
        TXL_HEAD_ADDRESS="10.0.0.7", SLURM_EXPORT_ENV="NONE",
    )  # fmt: skip
    code, output = job.finish()
    assert code == 0, output
    assert (job.records / "exported").read_text() == EXPORTED, "variables do not reach the tasks"
    environment, command = ((job.records / name).read_text() for name in ("environment", "ray"))
    assert "RAY_AUTH_MODE=token" in environment
    seconds = re.search(r"RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=(\d+)", environment)
    assert seconds is not None
    assert int(seconds[1]) >= 300
    port = 20_000 + int(JOB_ID) % 10_000
    assert f"symmetric-run --address 10.0.0.7:{port} --min-nodes 4" in command
    assert f"--on 10.0.0.7:{port} --ranks 32" in command
    assert (job.records / "mode").read_text().strip() == "600"
    assert "0123456789abcdef" not in command + environment + output


@pytest.mark.parametrize(
    ("variables", "waits_for", "number", "code", "is_requeued"),
    [
        ({}, "started", signal.SIGUSR1, 75, True),  # the time limit
        ({}, "started", signal.SIGTERM, 75, False),  # cancelled
        ({"HEAD_WAITS": "1"}, "ray", signal.SIGUSR1, 75, False),  # while the hosts start
        ({"EXIT_CODE": "5"}, None, None, 5, False),
        ({"HEAD_FAILS": "1"}, None, None, 1, False),
    ],
)
def test_a_stop_saves_and_other_ends_have_their_code_although_symmetric_run_exits_with_0(
    tmp_path: Path,
    variables: dict[str, str],
    waits_for: str | None,
    number: signal.Signals | None,
    code: int,
    is_requeued: bool,
) -> None:
    job = submit_driver(tmp_path, **variables)
    if waits_for is not None and number is not None:
        wait_until((job.records / waits_for).exists, timeout_seconds=30)
        job.process.send_signal(number)
    ended, output = job.finish()
    assert (ended, job.is_requeued) == (code, is_requeued), output
    assert (job.records / "stopped").exists() == (waits_for == "started")
    assert ("submit the same command again" in output) == ("HEAD_FAILS" in variables)
    assert not list((tmp_path / "run").glob(".slurm-ray-*")), "the token outlives the job"


@pytest.mark.cluster
def test_a_job_with_a_real_ray_saves_is_requeued_and_resumes(dataset: Path, tmp_path: Path) -> None:
    require_namespaces()
    run = tmp_path / "run"

    def submit_run() -> Job:
        return submit(
            "slurm_ray.sh", tmp_path, TINY, f"data.path={dataset}", f"directory={run}",
            NO_EVALUATION, "training.num_steps=150", prefix=ALONE,
            TXL_RANKS="2", RAY_TMPDIR=ray_directory,
        )  # fmt: skip

    # Short, because paths of sockets are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="txl-") as ray_directory:
        job = submit_run()
        wait_until(
            lambda: num_lines(run / "metrics.jsonl") > 10 or job.process.poll() is not None,
            timeout_seconds=240,
        )
        assert job.process.poll() is None, job.finish()
        [script] = psutil.Process(job.process.pid).children()
        script.send_signal(signal.SIGUSR1)
        code, output = job.finish(timeout_seconds=120)
        assert code == 75, output
        assert job.is_requeued
        saved_last_step(run)

        (job.records / "requeued").unlink()
        job = submit_run()
        code, output = job.finish(timeout_seconds=240)
    assert code == 0, output
    assert not job.is_requeued
    assert sorted(losses(run)) == list(range(1, 151))


# --- ranks.sh -------------------------------------------------------------------------------------


def start_ranks(tmp_path: Path, *words: object, **environment: str) -> Job:
    host = {"NUM_HOSTS": "2", "HOST_INDEX": "1", "MASTER_ADDR": "host-0", "RANKS_PER_HOST": "2"}
    return submit("ranks.sh", tmp_path, *words, **{**host, **environment})


@pytest.mark.parametrize(
    ("variables", "code"),
    [({}, 0), ({"WAITS": "1"}, 75), ({"FAILING_RANK": "2", "EXIT_CODE": "5"}, 5)],
)
def test_every_rank_knows_its_place_and_the_highest_exit_code_is_that_of_the_host(
    tmp_path: Path, variables: dict[str, str], code: int
) -> None:
    script = tmp_path / "rank"
    script.write_text(f"#!/bin/bash\n{RANK}")
    script.chmod(0o755)
    job = start_ranks(tmp_path, "config.yaml", "seed=2", TXL_PYTHON=str(script), **variables)
    if variables.get("WAITS"):  # one signal stops all ranks
        wait_until(lambda: num_lines(job.records / "ranks") == 2, timeout_seconds=30)
        job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] == code
    assert sorted((job.records / "ranks").read_text().splitlines()) == [
        "2 0 4 2 host-0:29500 -m txl_dist train config.yaml seed=2",
        "3 1 4 2 host-0:29500 -m txl_dist train config.yaml seed=2",
    ]


def test_ranks_that_wait_for_a_failed_one_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank"
    script.write_text(f"#!/bin/bash\n{RANK}")
    script.chmod(0o755)
    variables = {"FAILING_RANK": "3", "EXIT_CODE": "5", "WAITS": "1", "AFTER_FAILURE_SECONDS": "1"}
    job = start_ranks(tmp_path, "config.yaml", TXL_PYTHON=str(script), **variables)
    assert job.finish(timeout_seconds=30)[0] == 5


@pytest.mark.fault
def test_ranks_of_two_hosts_train_stop_and_resume(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (TINY, f"data.path={dataset}", f"directory={run}", NO_EVALUATION)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start_hosts() -> list[Job]:
        return [
            start_ranks(
                tmp_path, *words, "training.num_steps=150", HOST_INDEX=str(host),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANKS_PER_HOST="1",
            )
            for host in range(2)
        ]  # fmt: skip

    hosts = start_hosts()
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 10)
    hosts[1].process.send_signal(signal.SIGTERM)  # Kubernetes drains one host
    assert [host.finish(timeout_seconds=90)[0] for host in hosts] == [75, 75]
    saved_last_step(run)
    assert [host.finish(timeout_seconds=120)[0] for host in start_hosts()] == [0, 0]
    assert sorted(losses(run)) == list(range(1, 151))
