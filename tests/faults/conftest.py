"""A small file system, a small model, and a short folder for Ray."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exported_model import export_small_model


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 5 MiB. Skips the test if mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and a kernel that allows it")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="session")
def model(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small_model(tmp_path_factory.mktemp("model") / "small", dataset)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A TMPDIR for Ray with a short path, because the paths of its sockets are limited."""
    directory = Path(tempfile.mkdtemp(prefix="txl-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
