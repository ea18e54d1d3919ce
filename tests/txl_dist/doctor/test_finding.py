"""A check that blocks or fails is reported, and does not hide the others."""

import os
import time
from pathlib import Path

from txl_dist.doctor.checks import check_dataset
from txl_dist.doctor.finding import Finding, ok, run_checks


def test_a_check_that_blocks_is_abandoned_after_the_limit(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "manifest.json")  # a read blocks, as on a dead mount
    begin = time.monotonic()
    blocked, fine = run_checks(
        {"dataset": lambda: check_dataset(str(tmp_path / "data")), "devices": lambda: [ok("2")]},
        node="a",
        limit_seconds=0.3,
    )
    assert time.monotonic() - begin < 5
    assert (blocked.status, blocked.check, blocked.node) == ("problem", "dataset", "a")
    assert "no result after 0.3 s" in blocked.found
    assert (fine.status, fine.found) == ("ok", "2")


def test_an_unexpected_error_is_a_problem_without_its_secrets() -> None:
    def fail() -> list[Finding]:
        raise RuntimeError("http://user:canary@host answered\x1b[2J")

    (finding,) = run_checks({"tracking": fail}, node="a", limit_seconds=5)
    assert finding.status == "problem"
    assert "RuntimeError" in finding.found
    assert "canary" not in finding.found
    assert "\x1b" not in finding.found
