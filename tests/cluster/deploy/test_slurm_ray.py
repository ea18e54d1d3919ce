"""cluster/deploy/slurm_ray.sh, with replacements for Slurm's commands that work on this host.

The fast tests replace Ray and `txl` too: they test how the script handles signals and exit codes.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.deploy.jobs import ALONE, require_namespaces, start_job
from tests.support.commands import num_lines, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY, losses

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "cluster" / "deploy" / "slurm_ray.sh"
JOB_ID = str(10_000 + os.getpid() % 10_000)
SHUTDOWN_SECONDS = 20
"""How long the driver and Ray may take to end once the ranks have saved (launch/supervise.py)."""

SRUN = """#!/bin/bash
# Start the task of this host.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && echo "$2" >"$RECORDS/requeued"
"""
RAY = """#!/bin/bash
# symmetric-run, on the head node: record how it was called and run the command after `--`.
env | grep ^RAY_ | sort >"$RECORDS/environment"
[[ -n ${TOKEN_MODE_FILE:-} ]] && stat --format=%a "$RAY_AUTH_TOKEN_PATH" >"$TOKEN_MODE_FILE"
echo "$@" >"$RECORDS/ray"
[[ -n ${HEAD_FAILS:-} ]] && exit 0
[[ -n ${HEAD_WAITS:-} ]] && exec sleep 60
while [[ $1 != -- ]]; do shift; done
shift
"$@"
exit 0  # the script must not depend on this code
"""
PYTHON = """#!/bin/bash
case "$*" in
    *secrets*) echo -n 0123456789abcdef ;;
    *"config show invalid.yaml"*) exit 2 ;;
    *"config show"*) echo "directory: $RUN" ;;
    *train*)
        save() { touch "$RECORDS/stopped"; echo step-00000020 >"$RUN/LATEST"; exit 75; }
        trap save USR1
        touch "$RECORDS/started"
        [[ -n ${EXIT_CODE:-} ]] && exit "$EXIT_CODE"
        while true; do sleep 0.02; done ;;
esac
"""


@dataclass
class Job:
    """The script, as a process in the environment of a Slurm job."""

    process: subprocess.Popen[str]
    records: Path

    def finish(self, *, timeout_seconds: float = 30) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_seconds)
        return self.process.returncode, output

    @property
    def is_requeued(self) -> bool:
        return (self.records / "requeued").exists()


def submit(
    tmp_path: Path,
    *words: object,
    programs: dict[str, str],
    prefix: tuple[str, ...] = (),
    **environment: str,
) -> Job:
    """Start the script by `prefix`, with `programs` in front of the PATH."""
    directory, records = tmp_path / "bin", tmp_path / "records"
    for path in (directory, records, tmp_path / "run"):
        path.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **programs}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    process = start_job(
        [*prefix, str(SCRIPT), *map(str, words)],
        {
            "PATH": f"{directory}:{os.environ['PATH']}",
            "RECORDS": str(records),
            "RUN": str(tmp_path / "run"),
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_ON_NODE": "2",
            "TXL_PYTHON": str(directory / "python") if "python" in programs else sys.executable,
            **environment,
        },
    )
    return Job(process, records)


def submit_replaced(tmp_path: Path, *words: str, **environment: str) -> Job:
    words = words or ("config.yaml",)
    return submit(tmp_path, *words, programs={"ray": RAY, "python": PYTHON}, **environment)


def test_the_signal_reaches_only_the_script_and_leaves_time_to_save() -> None:
    text = SCRIPT.read_text()
    notice = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    grace = re.search(r"^grace_seconds=(\d+)$", text, re.MULTILINE)
    assert notice is not None
    assert grace is not None
    assert int(grace[1]) + SHUTDOWN_SECONDS <= int(notice[1])


def test_ray_requires_the_token_of_this_job_and_waits_for_all_hosts(tmp_path: Path) -> None:
    mode = tmp_path / "mode"
    job = submit_replaced(
        tmp_path, EXIT_CODE="0", SLURM_JOB_NUM_NODES="4", SLURM_GPUS_ON_NODE="8",
        TXL_HEAD_ADDRESS="10.0.0.7", TOKEN_MODE_FILE=str(mode),
    )  # fmt: skip
    code, output = job.finish()
    assert code == 0, output
    environment = (job.records / "environment").read_text()
    assert "RAY_AUTH_MODE=token" in environment
    seconds = re.search(r"RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=(\d+)", environment)
    assert seconds is not None
    assert int(seconds[1]) >= 300
    command = (job.records / "ray").read_text()
    port = 20_000 + int(JOB_ID) % 10_000
    assert f"symmetric-run --address 10.0.0.7:{port} --min-nodes 4" in command
    assert f"--on 10.0.0.7:{port} --ranks 32" in command
    assert mode.read_text().strip() == "600"
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
    job = submit_replaced(tmp_path, **variables)
    if waits_for is not None and number is not None:
        wait_until((job.records / waits_for).exists, timeout_seconds=30)
        job.process.send_signal(number)
    ended, output = job.finish()
    assert (ended, job.is_requeued) == (code, is_requeued), output
    assert (job.records / "stopped").exists() == (waits_for == "started")
    assert ("submit the same command again" in output) == ("HEAD_FAILS" in variables)
    assert not list((tmp_path / "run").glob(".slurm-ray-*")), "the token outlives the job"


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """Short, because paths of sockets are limited to 107 characters."""
    with tempfile.TemporaryDirectory(prefix="txl-") as directory:
        yield directory


@pytest.mark.cluster
def test_a_job_with_a_real_ray_saves_is_requeued_and_resumes(
    dataset: Path, tmp_path: Path, ray_directory: str
) -> None:
    require_namespaces()
    run = tmp_path / "run"

    def submit_run() -> Job:
        return submit(
            tmp_path, TINY, f"data.path={dataset}", f"directory={run}", NO_EVALUATION,
            "training.num_steps=150", programs={}, prefix=ALONE,
            TXL_RANKS="2", RAY_TMPDIR=ray_directory,
        )  # fmt: skip

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
    stopped_at = max(losses(run))
    assert (run / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()

    (job.records / "requeued").unlink()
    job = submit_run()
    code, output = job.finish(timeout_seconds=240)
    assert code == 0, output
    assert not job.is_requeued
    assert sorted(losses(run)) == list(range(1, 151))
