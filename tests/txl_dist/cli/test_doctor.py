"""`txl doctor`: exit code, JSON and lines."""

import json
import socket
from pathlib import Path

import pytest

from tests.support.commands import run_txl
from txl_dist.doctor.finding import Finding, ok, print_report, problem


def test_all_is_well_with_exit_code_0(dataset: Path, tmp_path: Path) -> None:
    options = ("--run", tmp_path / "run", "--data", dataset, "--min-free-gib", "0")
    code, output = run_txl("doctor", *options, "--skip", "exposure")
    assert code == 0, output
    for check in ("versions", "devices", "tracking", "storage", "dataset"):
        assert f" {check} " in output
    assert "no problems found" in output


def test_a_problem_gives_exit_code_1_and_one_json_object(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
    options = ("--tracking-uri", uri, "--data", tmp_path / "none", "--skip", "devices", "--json")
    code, output = run_txl("doctor", *options)
    assert code == 1
    report = json.loads(output)
    assert not report["ok"]
    bad = {one["check"]: one for one in report["findings"] if one["status"] == "problem"}
    assert set(bad) >= {"tracking", "dataset"}
    for row in bad.values():
        assert set(row) == {"node", "check", "status", "found", "expected", "advice"}
        assert all(row.values())
    assert "devices" not in {one["check"] for one in report["findings"]}


def test_an_unknown_check_and_a_url_as_run_directory_are_refused() -> None:
    assert run_txl("doctor", "--skip", "virus")[0] == 2
    assert run_txl("doctor", "--run", "s3://bucket/run")[0] == 2


def test_nodes_with_the_same_finding_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def at(node: str, finding: Finding) -> Finding:
        return Finding(
            status=finding.status,
            found=finding.found,
            expected=finding.expected,
            advice=finding.advice,
            check="storage",
            node=node,
        )

    bad = problem("no mount", expected="a mount", advice="mount it")
    print_report([at("n1", bad), *(at(f"n{number}", ok("fine")) for number in range(2, 9))])
    fine, problems, total = capsys.readouterr().out.splitlines()
    assert "n2, n3, n4, n5 and 3 more: fine" in fine
    assert problems.endswith("n1: no mount | expected: a mount | do: mount it")
    assert total == "1 problem found"
