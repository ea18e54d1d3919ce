"""A real Slurm with two nodes on one machine: each node is a network namespace with its slurmd.

The daemons are those of Debian's slurm-wlm, with a generated slurm.conf and a munged of their own.
Nothing of an installed cluster is read or changed.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT, wait_until
from tests.support.hosts import Host, two_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """
ClusterName=txl
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for cred_expire seconds before it starts again; the default is 120.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
# No control groups: the machine's own are left alone.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MailProg=/bin/true
SchedulerParameters=sched_interval=2,batch_sched_delay=1
ReturnToService=2
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Slurm:
    hosts: tuple[Host, Host]
    directory: Path
    environment: Mapping[str, str]

    def call(self, *words: object) -> str:
        """Run a command of Slurm on the first node; its output. AssertionError if it fails."""
        ended = subprocess.run(
            [*self.hosts[0].prefix, *map(str, words)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environment,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}{self.logs()}"
        return ended.stdout

    def submit(self, *words: object) -> str:
        """sbatch; the id of the job."""
        return self.call("sbatch", "--parsable", *words).strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, Restarts, ExitCode, Reason ..."""
        fields = self.call("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def logs(self) -> str:
        """The last lines of all daemons, for messages of failed tests."""
        files = sorted(self.directory.glob("*.log"))
        return "".join(f"\n--- {file.name}\n{file.read_text()[-3000:]}" for file in files)


@contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Start all daemons; at the end they and all their jobs are killed. Skips without Slurm."""
    for name in PROGRAMS:
        if shutil.which(name, path=_path()) is None:
            pytest.skip(f"{name} is not installed (Debian: apt install slurm-wlm munge)")
    with ExitStack() as stack:
        # Not in tmp_path: paths of sockets are limited.
        directory = Path(tempfile.mkdtemp(prefix="txl-slurm-", dir="/tmp"))
        stack.callback(shutil.rmtree, directory)
        hosts = stack.enter_context(two_hosts(names_in=directory))
        _write_config(directory, hosts)
        slurm = Slurm(hosts, directory, _environment(directory))
        _start(stack, slurm, 0, "munged", "--foreground", "--force", *_munge_files(directory))
        wait_until((directory / "munge.socket").exists, timeout_seconds=20)
        _start(stack, slurm, 0, "slurmctld", "-D")
        for number, host in enumerate(hosts):
            _start(stack, slurm, number, "slurmd", "-D", "-N", host.name)
        _wait_for_nodes(slurm)
        yield slurm


def _write_config(directory: Path, hosts: Sequence[Host]) -> None:
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2" for host in hosts]
    text = CONFIG.format(controller=hosts[0], directory=directory, nodes="\n".join(nodes))
    (directory / "slurm.conf").write_text(text)
    # slurmd loads a plugin even if no control groups are used; this one needs no mounts.
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    for name in ("state", *(f"spool-{host.name}" for host in hosts)):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))


def _munge_files(directory: Path) -> list[str]:
    files = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    return [*files, f"--socket={directory}/munge.socket"]


def _environment(directory: Path) -> dict[str, str]:
    """Also that of the jobs: sbatch passes it on."""
    # The tests may themselves run in a job of Slurm.
    mine = {k: v for k, v in ENVIRONMENT.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    return {
        **mine,
        "PATH": _path(),
        "SLURM_CONF": str(directory / "slurm.conf"),
        "TXL_PYTHON": sys.executable,
    }


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _start(stack: ExitStack, slurm: Slurm, node: int, *words: str) -> None:
    log = slurm.directory / f"{words[0]}-{node}.out.log"
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            [*slurm.hosts[node].prefix, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=slurm.environment,
        )
    stack.callback(_end, daemon)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()  # a killed slurmctld would leave its helper process
    try:
        daemon.wait(timeout=10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait_for_nodes(slurm: Slurm) -> None:
    try:
        wait_until(
            lambda: _idle_nodes(slurm) == len(slurm.hosts), timeout_seconds=60, poll_seconds=0.5
        )
    except AssertionError as error:
        raise AssertionError(f"the nodes did not join the cluster:{slurm.logs()}") from error


def _idle_nodes(slurm: Slurm) -> int:
    ended = subprocess.run(
        [*slurm.hosts[0].prefix, "sinfo", "--noheader", "--Node", "--format=%T"],
        check=False,
        capture_output=True,
        text=True,
        env=slurm.environment,
    )
    return ended.stdout.split().count("idle")
