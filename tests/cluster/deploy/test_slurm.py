"""cluster/deploy/slurm.sh, with replacements for srun and scontrol that work on this host."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT, num_lines, wait_until
from tests.support.training_runs import NO_EVALUATION, TINY, losses

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "cluster" / "deploy" / "slurm.sh"
NUM_RANKS = 2
JOB_ID = str(10_000 + os.getpid() % 10_000)

SRUN = """#!/bin/bash
# Start one process per task on this host; exit with the highest exit code, as srun does.
while [[ $1 == --* ]]; do shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    pids+=($!)
done
echo "${pids[@]}" >"$RECORDS/pids"
highest=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >"$RECORDS/requeued" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What Slurm sets in a job with two tasks; `records` has what the replacements recorded."""
    programs, records = tmp_path / "bin", tmp_path / "records"
    programs.mkdir()
    records.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **ENVIRONMENT,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RECORDS": str(records),
        "TXL_PYTHON": sys.executable,
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NODELIST": "host[1-2]",
        "SLURM_NTASKS": str(NUM_RANKS),
        "SLURM_NTASKS_PER_NODE": str(NUM_RANKS),
        "SLURM_CPUS_PER_TASK": "1",
    }


def submit(environment: dict[str, str], *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPT), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
    )


@pytest.mark.parametrize("script", ["slurm.sh", "slurm_ray.sh"])
@pytest.mark.parametrize("place", ["work/.venv/bin", "bin"])
def test_the_python_is_that_of_the_directory_or_of_the_activated_environment(
    environment: dict[str, str], script: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    python = tmp_path / place / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("#!/bin/bash\necho this python $* >&2; exit 2\n")
    python.chmod(0o755)
    del environment["TXL_PYTHON"]
    environment["SLURM_JOB_NUM_NODES"] = "2"
    job = subprocess.run(
        [SCRIPT.with_name(script), "small.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path / "work",
    )
    assert (job.returncode, job.stderr) == (2, "this python -m txl_dist config show small.yaml\n")


def test_the_ranks_end_before_slurm_kills_them() -> None:
    text = SCRIPT.read_text()
    notice = re.search(r"^#SBATCH --signal=USR1@(\d+)$", text, re.MULTILINE)
    grace = re.search(r"^grace_seconds=(\d+)$", text, re.MULTILINE)
    assert notice is not None
    assert grace is not None
    assert int(grace[1]) < int(notice[1])


def test_an_invalid_config_ends_with_its_exit_code_and_is_not_requeued(
    environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit(environment, tmp_path / "missing.yaml")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2, output
    assert not (tmp_path / "records" / "requeued").exists()


def test_without_a_newer_checkpoint_the_job_is_not_requeued(
    environment: dict[str, str], dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 75\n")
    job = submit(environment, TINY, f"data.path={dataset}", f"directory={tmp_path / 'run'}")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 75, output
    assert "stopped without a new checkpoint" in output
    assert not (tmp_path / "records" / "requeued").exists()


@pytest.mark.fault
def test_a_job_that_slurm_warns_saves_is_requeued_and_resumes(
    environment: dict[str, str], dataset: Path, tmp_path: Path
) -> None:
    run, records = tmp_path / "run", tmp_path / "records"
    words = (TINY, f"data.path={dataset}", f"directory={run}", NO_EVALUATION)
    job = submit(environment, *words, "training.num_steps=150")
    wait_until(lambda: num_lines(run / "metrics.jsonl") > 10)
    for pid in (records / "pids").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    output, _ = job.communicate(timeout=90)
    assert job.returncode == 75, output
    assert (records / "requeued").read_text().strip() == JOB_ID
    stopped_at = max(losses(run))
    assert (run / "checkpoints" / f"step-{stopped_at:08d}" / "manifest.json").exists()

    (records / "requeued").unlink()
    job = submit(environment, *words, "training.num_steps=150")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert f"rank 0 of {NUM_RANKS}" in output
    assert not (records / "requeued").exists()
    assert sorted(losses(run)) == list(range(1, 151))
