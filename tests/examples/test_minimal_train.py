"""The example of one process: it trains, and uses nothing but the public API."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import txl_dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_train.py"


def test_it_trains_and_scores_the_model_that_it_wrote(dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(dataset), "--out", str(tmp_path / "model")]
    ended = subprocess.run([*command, "--steps", "30"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+ \| loss ([\d.]+)", ended.stdout)]
    assert losses[-1] < 0.8 * losses[0]
    (score,) = re.findall(r"valid: loss ([\d.]+)", ended.stdout)
    result = txl_dist.evaluate(txl_dist.evaluation_spec(tmp_path / "model", dataset))
    assert score == f"{result.sums.nats_per_token:.4f}"


def test_it_is_short_and_imports_public_names_only() -> None:
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imported if node.module not in ("pathlib",)]
    assert [node.module for node in ours] == ["txl_dist"]
    assert {alias.name for node in ours for alias in node.names} <= set(txl_dist.__all__)
