"""Versions: differences are named with both. The run directory: real file systems."""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
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


def statuses(findings: Iterable[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def test_the_versions_of_constraints_txt_are_installed() -> None:
    assert set(pinned_versions()) >= {"torch", "ray", "mlflow"}
    assert statuses(check_versions()) == ["ok"]


def test_every_difference_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_versions()
    build = installed["torch"].partition("+")[0] + "+cu999"
    pins = {**installed, "torch": build, "ray": "2.59.1"}
    monkeypatch.setattr(checks, "pinned_versions", lambda: pins)
    _, ray = check_versions()
    assert (ray.status, ray.found) == ("problem", f"ray {installed['ray']}")
    assert ray.expected == "ray 2.59.1 (constraints.txt)"
    assert "same sources" in ray.advice


def test_without_a_constraints_file_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(txl_dist, "__file__", str(tmp_path / "txl_dist" / "__init__.py"))
    assert pinned_versions() == {}
    assert statuses(check_versions()) == ["ok", "note"]


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
        notes = [each for each in check_run_directory(str(run), min_free_bytes=0) if each.advice]
        assert len(notes) == expected
        assert all("lookupcache=positive" in finding.advice for finding in notes)
    assert mount_of(tmp_path) == ("ext4", {"rw"})
