"""Versions: differences are named with both. The run directory: real file systems."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import txl_dist
from txl_dist.doctor import checks
from txl_dist.doctor.checks import (
    check_run_directory,
    check_versions,
    installed_versions,
    mount_of,
    pinned_versions,
)
from txl_dist.doctor.finding import Finding

Mount = Callable[[str], Path]


def test_the_versions_of_constraints_txt_are_installed() -> None:
    pins = pinned_versions()
    assert set(pins) >= {"torch", "ray", "mlflow"}
    (finding,) = check_versions(pins, source="constraints.txt")
    assert finding.status == "ok"
    assert Path(txl_dist.__file__).parents[1].joinpath("constraints.txt").exists()


def test_every_difference_is_named_with_both_versions() -> None:
    installed = installed_versions()
    build = installed["torch"].partition("+")[0] + "+cu999"
    expected = {**installed, "torch": build, "ray": "2.59.1", "txl-dist": "0.1.0 (sources 0)"}
    ray, code = check_versions(expected, source="this machine")
    assert (ray.status, code.status) == ("problem", "problem")
    assert ray.found == f"ray {installed['ray']}"
    assert ray.expected == "ray 2.59.1 (this machine)"
    assert "same sources" in code.advice


def test_without_a_constraints_file_nothing_is_compared(tmp_path: Path) -> None:
    assert pinned_versions(tmp_path / "constraints.txt") == {}
    assert [finding.status for finding in check_versions({}, source="")] == ["note"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs with the given options."""
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        path = tmp_path / f"mount-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
            pytest.skip("mounting a file system needs root and a kernel that allows it")
        mounted.append(path)
        return path

    yield mount_tmpfs
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def test_a_usable_directory_is_left_as_it_was(tmp_path: Path) -> None:
    (finding,) = check_run_directory(str(tmp_path / "runs" / "new"), min_free_bytes=1)
    assert finding.status == "ok"
    assert str(tmp_path) in finding.found
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_a_problem(mount: Mount) -> None:
    disk = mount("size=64k")
    findings = check_run_directory(str(disk / "run"), min_free_bytes=0)
    assert statuses(findings) == ["problem"]
    assert "No space left" in findings[0].found
    assert "free space" in findings[0].advice
    assert list(disk.iterdir()) == []


def test_too_little_space_is_a_problem(mount: Mount) -> None:
    (finding,) = check_run_directory(str(mount("size=8m")), min_free_bytes=2**30)
    assert finding.status == "problem"
    assert "0.01 GiB free" in finding.found
    assert "1.00 GiB" in finding.expected


def test_a_read_only_file_system_is_a_problem(mount: Mount) -> None:
    (finding,) = check_run_directory(str(mount("ro")), min_free_bytes=0)
    assert finding.status == "problem"
    assert "Read-only file system" in finding.found


def test_an_nfs_mount_that_hides_new_files_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a b" / "run"
    run.mkdir(parents=True)
    place = str(run.parent)
    for options, expected in (("rw,hard", 1), ("rw,lookupcache=pos,acdirmin=1", 0)):
        mounts = [
            SimpleNamespace(mountpoint=place, fstype="nfs4", opts=options),
            SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw"),
        ]
        monkeypatch.setattr(checks.psutil, "disk_partitions", lambda all, mounts=mounts: mounts)
        assert mount_of(run) == ("nfs4", set(options.split(",")))
        findings = list(checks._nfs(run, "run"))
        assert len(findings) == expected
        assert all("lookupcache=positive" in finding.advice for finding in findings)
    assert mount_of(tmp_path) == ("ext4", {"rw"})
