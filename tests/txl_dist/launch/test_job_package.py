"""The package of a job: what travels, what does not, and that it is complete."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from txl_dist.errors import ConfigError
from txl_dist.launch import job_package
from txl_dist.launch.job_package import Package, collect_package

FILES = {
    "configs/a.yaml": "a",
    "src/model.py": "m",
    "src/data/loader.py": "only data/ of the working directory is excluded",
    ".git/config": "g",
    ".venv/lib/x.py": "v",
    "src/__pycache__/model.pyc": "c",
    "runs/a/metrics.jsonl": "r",
    "data/a/manifest.json": "d",
    ".env": "PASSWORD=CANARY",
    "deploy/server.key": "CANARY",
    "home/.aws/credentials": "CANARY",
    "ignored/big.bin": "b",
    "notes/private.txt": "p",
    "notes/public.txt": "q",
    "notes/sub/private.txt": "s",
    "results/mine/x": "run directory of the config",
    ".gitignore": "ignored/\n*.log\n",
    "notes/.gitignore": "private.txt\n",
    "notes/sub/.gitignore": "!private.txt\n",
    ".rayignore": "*.ckpt\n",
    "x.log": "l",
    "x.ckpt": "k",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(package: Package) -> set[str]:
    """Without the code of this project."""
    return {n for n in package.files if n.split("/")[0] not in {"cluster", "data_pipeline"}} - {
        name for name in package.files if name.startswith("txl_dist/")
    }


@pytest.mark.fault_row(44)
def test_code_and_configs_travel_and_nothing_else(project: Path) -> None:
    package = collect_package(project, excluded_paths=[Path("results/mine")])
    assert names(package) == {
        *("configs/a.yaml", "src/model.py", "src/data/loader.py"),
        *("notes/public.txt", "notes/sub/private.txt"),
        *(".gitignore", ".rayignore", "notes/.gitignore", "notes/sub/.gitignore"),
    }
    assert {".git/", ".venv/", "runs/", "data/", "ignored/", ".env", "results/mine/"} <= set(
        package.excluded
    )
    assert not any(
        b"CANARY" in path.read_bytes() for path in map(package.files.get, names(package))
    )
    assert "runs/" in package.description()


def test_patterns_of_the_user_and_configs_that_are_ignored(project: Path) -> None:
    package = collect_package(
        project, exclude=["notes", "*.py"], configs=[Path("ignored/big.bin"), Path("x.log")]
    )
    found = names(package)
    assert {"ignored/big.bin", "x.log", "configs/a.yaml"} <= found
    assert not any(name.startswith("notes") or name.endswith(".py") for name in found)


@pytest.mark.fault_row(45)
def test_no_link_leads_out_of_the_working_directory(project: Path, tmp_path: Path) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-outside"
    secret.mkdir()
    (secret / "file").write_text("CANARY")
    (project / "link.txt").symlink_to(secret / "file")
    (project / "folder").symlink_to(secret)
    (project / "cycle").symlink_to(project)
    (project / "configs/latest.yaml").symlink_to("a.yaml")
    os.mkfifo(project / "fifo")
    package = collect_package(project)
    assert "configs/latest.yaml" in package.files
    assert {"link.txt", "folder/", "cycle/", "fifo"} <= set(package.excluded)


def test_equal_files_give_equal_bytes(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_package, "PACKAGES", ())  # packing the code takes 0.3 s
    first, second = tmp_path / "1.zip.tmp", tmp_path / "2.zip.tmp"
    collect_package(project).write(first)
    for path in project.rglob("*.py"):
        os.utime(path, (0, 0))
    collect_package(project).write(second)
    assert first.read_bytes() == second.read_bytes()
    assert {entry.date_time[0] for entry in zipfile.ZipFile(first).infolist()} == {1980}
    (project / "src/model.py").write_text("n")
    collect_package(project).write(second)
    assert first.read_bytes() != second.read_bytes()


def test_a_package_that_is_too_large_is_refused_with_its_largest_entries(project: Path) -> None:
    (project / "weights").mkdir()
    for number in range(3):
        (project / f"weights/{number}.bin").write_bytes(b"w" * 1_000_000)
    (project / "large.txt").write_bytes(b"t" * 2_000_000)
    package = collect_package(project)
    package.require_size()
    with pytest.raises(
        ConfigError, match=r"Largest: weights/ \(2\.9 MiB\), large.txt \(1\.9 MiB\)"
    ):
        package.require_size(1_000_000)


@pytest.mark.slow
def test_the_package_runs_where_this_project_is_not_installed(
    project: Path, tmp_path: Path
) -> None:
    """Launchers are found by entry points, so the package has them."""
    archive, unpacked = tmp_path / "package.tmp", tmp_path / "unpacked"
    collect_package(project).write(archive)
    zipfile.ZipFile(archive).extractall(unpacked)
    program = (
        "import txl_dist; from txl_dist.launch.jobs import find_job_client as c;"
        "from importlib.metadata import version, entry_points as e;"
        "print(txl_dist.__file__, version('txl-dist'), *e(group='txl.launchers').names)"
    )
    libraries = tmp_path / "libraries"  # site-packages without this project
    libraries.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "txl_dist" not in path.name:
            (libraries / path.name).symlink_to(path)
    # -S: no .pth files, so no editable installation.
    ended = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program],
        env={"PYTHONPATH": f"{unpacked}:{libraries}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    assert ended.stdout.startswith(str(unpacked / "txl_dist"))
    assert "processes" in ended.stdout
