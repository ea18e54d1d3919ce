"""`txl checkpoint` as a command. Tests of the work of the other commands are next to it."""

import json
from pathlib import Path

from tests.support.commands import run_txl


def test_checkpoints_are_listed_with_what_they_hold(run: Path) -> None:
    code, output = run_txl("checkpoint", "list", run, "--json")
    assert code == 0
    listed = json.loads(output)["checkpoints"]
    assert [row["step"] for row in listed] == [18, 20]
    assert listed[-1]["tokens"] == 300
    assert [row["pointers"] for row in listed][-1][0] == "LATEST"
    assert sum("BEST" in row["pointers"] for row in listed) == 1
    assert listed[0]["nats_per_token"] is None, "step 18 was not evaluated"
    assert 1 < listed[1]["nats_per_token"] < 6
    _, text = run_txl("checkpoint", "list", run)
    assert "LATEST" in text.splitlines()[-1]
    assert f"validation loss {listed[1]['nats_per_token']:.4f}" in text.splitlines()[-1]
    assert "LATEST" not in text.splitlines()[0]
