"""docs/how_to/run_on_a_cluster.md: its commands, as far as one machine can run them."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.deploy.jobs import ALONE, require_namespaces
from tests.support.commands import ENVIRONMENT

ROOT = Path(__file__).parents[3]
HOW_TO = ROOT / "docs" / "how_to" / "run_on_a_cluster.md"
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"\*\*(Tested|Not tested here)")


def blocks() -> Iterator[tuple[str, str]]:
    """Every block of commands, with the last mark before it in its section."""
    text = HOW_TO.read_text()
    for block in _BLOCK.finditer(text):
        section = text[: block.start()].rpartition("\n## ")[2]
        marks = _MARK.findall(section)
        yield textwrap.dedent(block[1]), marks[-1] if marks else "none"


def test_every_block_says_whether_it_was_tested() -> None:
    unmarked = [commands for commands, mark in blocks() if mark == "none"]
    assert not unmarked


def test_every_file_that_the_commands_name_exists() -> None:
    names = re.findall(r"(?<![\w/])(?:cluster|configs)/[\w./-]+", HOW_TO.read_text())
    assert len(names) > 15
    assert not {name for name in names if not (ROOT / name.rstrip(".")).exists()}


def test_a_ray_that_is_started_as_documented_reports_no_usage() -> None:
    """Ray asks on a terminal, and reports by default elsewhere. The image has the variable, too."""
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "cluster/deploy").rglob("*.*")]
    starts = [
        line
        for path in files
        if path.parent.name != "decisions"
        for line in path.read_text().splitlines()
        if re.match(r"[^`|]*\bray start --", line)
    ]
    assert len(starts) >= 8
    assert not [line for line in starts if "--disable-usage-stats" not in line]
    for name in ("Dockerfile", "slurm_ray.sh"):
        assert "RAY_USAGE_STATS_ENABLED=0" in (ROOT / "cluster" / "deploy" / name).read_text()


@pytest.mark.cluster
def test_the_tested_commands_work_as_they_are_written(tmp_path: Path) -> None:
    require_namespaces()
    programs, home = tmp_path / "bin", tmp_path / "home"
    for path in (programs, home):
        path.mkdir()
    (programs / "txl").write_text(f'#!/bin/sh\nexec {sys.executable} -m txl_dist "$@"\n')
    (programs / "txl").chmod(0o755)
    for name in ("README.md", "docs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = "\n".join(commands for commands, mark in blocks() if mark == "Tested")
    assert "ray start --head" in script
    with tempfile.TemporaryDirectory(prefix="txl-") as ray_directory:
        result = subprocess.run(
            [*ALONE, "bash", "-euxc", script],
            check=False,
            capture_output=True,
            text=True,
            timeout=900,
            cwd=tmp_path,
            env={
                # Without the token of this test session (tests/cluster/conftest.py).
                **{k: v for k, v in ENVIRONMENT.items() if not k.startswith("RAY_")},
                "HOME": str(home),
                "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "RAY_TMPDIR": ray_directory,
            },
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    for run in ("first-run", "on-the-cluster"):
        assert (tmp_path / "runs" / run / "LATEST").read_text().strip().endswith("600")
