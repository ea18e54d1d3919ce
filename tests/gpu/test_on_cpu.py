"""The tests for GPUs pass on a CPU: they call what exists, and their expectations agree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("test_*_on_gpu.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_gpu_tests_pass_on_the_cpu(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", path]
    environment = os.environ | {"GPU_TESTS_ON": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout
