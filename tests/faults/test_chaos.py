"""Twenty kills at random moments: `make chaos` at a small size, as in docs/faults.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.fault
@pytest.mark.fault_row(1, 2, 5, 8, 32)
def test_twenty_random_kills_change_no_number(tmp_path: Path) -> None:
    chaos = [sys.executable, REPOSITORY / "benchmarks" / "chaos.py"]
    ended = subprocess.run(
        [*map(str, chaos), "--kills", "20", "--out", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=3000,
        env={**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["kills"] == 20
    assert result["largest_loss_difference"] == 0.0
    for comparison in result["comparisons"]:
        assert all(comparison[part] for part in ("metrics", "weights", "mlflow", "copy"))
    assert sum(result["by_phase"].values()) == 20
    assert result["by_phase"]["upload"]
    assert result["by_phase"]["replay"]
    assert result["lost_disks"]
    assert (tmp_path / "chaos.png").stat().st_size > 10_000
