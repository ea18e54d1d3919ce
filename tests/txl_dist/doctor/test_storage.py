"""The run directory: real file systems that are full, read-only or not shared."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from txl_dist.doctor import storage
from txl_dist.doctor.finding import Finding
from txl_dist.doctor.storage import SharedProbe, check_run_directory, mount_of

Mount = Callable[[str], Path]


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


def test_too_little_space_and_too_few_inodes_are_problems(mount: Mount) -> None:
    findings = check_run_directory(str(mount("size=8m,nr_inodes=50")), min_free_bytes=2**30)
    assert statuses(findings) == ["problem", "problem"]
    assert "0.01 GiB free" in findings[0].found
    assert "1.00 GiB" in findings[0].expected
    assert "inodes" in findings[1].found


def test_a_read_only_file_system_is_a_problem(mount: Mount) -> None:
    (finding,) = check_run_directory(str(mount("ro")), min_free_bytes=0)
    assert finding.status == "problem"
    assert "Read-only file system" in finding.found


def test_nodes_that_share_a_directory_see_files_and_locks(tmp_path: Path) -> None:
    first, second = SharedProbe(str(tmp_path)), SharedProbe(str(tmp_path))
    names = {"a": first.place(), "b": second.place()}
    assert second.read(names) == {"a": "seen", "b": "seen"}
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_files_and_locks_that_are_not_shared_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_dist.doctor.storage.SHARED_WAIT_SECONDS", 0.0)
    (tmp_path / "other").mkdir()
    first, second = SharedProbe(str(tmp_path)), SharedProbe(str(tmp_path / "other"))
    names = {"a": first.place(), "b": second.place()}
    (tmp_path / names["b"]).write_text("of another file system")
    assert first.read(names) == {"a": "seen", "b": "other content"}
    assert second.read(names) == {"a": "missing", "b": "seen"}
    # A copy of the file has no lock: as if locks were valid on one node only.
    (tmp_path / "other" / names["a"]).write_text(names["a"])
    assert second.read(names) == {"a": "lock not seen", "b": "seen"}


def test_an_nfs_mount_that_hides_new_files_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    run = tmp_path / "a b" / "run"
    run.mkdir(parents=True)
    place = str(run.parent).replace(" ", r"\040")
    for options, expected in (("rw,hard", 1), ("rw,lookupcache=pos,acdirmin=1", 0)):
        mounts.write_text(f"/dev/x / ext4 rw 0 0\nhost:/x {place} nfs4 {options} 0 0\n")
        assert mount_of(run, mounts) == ("nfs4", set(options.split(",")))
        findings = list(storage._nfs(run, "run", mounts))
        assert len(findings) == expected
        assert all("lookupcache=positive" in finding.advice for finding in findings)
    assert mount_of(tmp_path, mounts) == ("ext4", {"rw"})
