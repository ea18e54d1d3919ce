"""The devices of a node: GPUs with their driver, or CPUs; and whether torch can use them."""

import os
import shutil
import subprocess
from pathlib import Path

from txl_dist.doctor.finding import Finding, note, ok, problem

_GIB = 2**30
_NVIDIA_SMI_SECONDS = 10.0
_SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY_BYTES = _GIB
"""NCCL exchanges data of GPUs on one node through /dev/shm; Docker's default is 64 MiB."""


def check_devices() -> list[Finding]:
    """GPUs if the driver lists some, else CPUs."""
    gpus = list_gpus()
    return check_gpus(gpus) if gpus else check_cpus()


def list_gpus() -> list[str]:
    """One line per GPU of this machine: name, driver version, memory. [] without NVIDIA's tools."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        ended = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return ended.stdout.strip().splitlines()


def check_gpus(listed: list[str]) -> list[Finding]:
    """Whether torch can use the GPUs that the driver lists."""
    import torch

    from txl_dist.model.devices import triton_unavailable_reason

    summary = f"{len(listed)} GPUs ({'; '.join(sorted(set(listed)))}), torch {torch.__version__}"
    if torch.version.cuda is None:
        return [
            problem(
                f"{summary}, a build for CPUs",
                expected="a build of torch for CUDA",
                advice="install torch from the index for CUDA (https://pytorch.org), or hide the "
                "GPUs: CUDA_VISIBLE_DEVICES=",
            )
        ]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [ok(f"{summary}; all are hidden by CUDA_VISIBLE_DEVICES=")]
    if not torch.cuda.is_available():
        return [
            problem(
                f"{summary} for CUDA {torch.version.cuda}, which finds no usable GPU",
                expected="torch.cuda.is_available()",
                advice="the driver is too old for this CUDA, or does not run: see nvidia-smi",
            )
        ]
    findings = []
    capability = min(
        torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())
    )
    built_for = sorted(
        int(name.removeprefix("sm_").rstrip("af"))
        for name in torch.cuda.get_arch_list()
        if name.startswith("sm_")
    )
    if built_for and capability[0] * 10 + capability[1] < built_for[0]:
        findings.append(
            problem(
                f"{summary}: compute capability {capability[0]}.{capability[1]}",
                expected=f"at least {built_for[0] / 10:.1f} for this build of torch",
                advice="install a build of torch for this GPU, or exclude the node",
            )
        )
    if reason := triton_unavailable_reason(torch.device("cuda")):
        findings.append(
            note(
                f"{summary}: triton's kernels cannot run: {reason}",
                expected="the package triton, a C compiler, and compute capability 8.0 or newer",
                advice="training works, with slower attention and dropout",
            )
        )
    if (shared := shared_memory_bytes()) < MIN_SHARED_MEMORY_BYTES:
        findings.append(
            note(
                f"/dev/shm has {shared / _GIB:.2f} GiB",
                expected=f"{MIN_SHARED_MEMORY_BYTES / _GIB:g} GiB or more for NCCL",
                advice="docker run --shm-size=8g; on Kubernetes mount an emptyDir of medium Memory",
            )
        )
    visible = torch.cuda.device_count()
    described = f"{summary}, capability {capability[0]}.{capability[1]}, {visible} visible"
    return findings or [ok(described)]


def check_cpus() -> list[Finding]:
    """The CPUs that this process may use; a note if that is less than the machine has."""
    total, usable = os.cpu_count() or 1, usable_cpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    summary = f"no GPU; {total} CPUs, {memory:.1f} GiB memory"
    if usable < total:
        return [
            note(
                f"{summary}; this process may use {usable:g} CPUs",
                expected=f"{total} CPUs",
                advice="give ray start --num-cpus, so that ranks start no more threads than that",
            )
        ]
    return [ok(summary)]


def usable_cpus() -> float:
    """CPUs by affinity (taskset, Slurm) and by the quota of the control group (containers)."""
    return min(float(len(os.sched_getaffinity(0))), _quota_cpus(Path("/sys/fs/cgroup/cpu.max")))


def _quota_cpus(path: Path) -> float:
    """The quota in control groups v2: `max 100000` or `MICROSECONDS PERIOD`."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def shared_memory_bytes() -> int:
    """The size of /dev/shm; 0 if there is none."""
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.exists() else 0
