"""`txl generate` as a command."""

import json
from pathlib import Path

from tests.support.commands import run_txl


def test_the_same_seed_generates_the_same_text(run: Path) -> None:
    arguments = ("generate", run, "--prompt", "def f(", "--max-tokens", 12, "--json")
    first, again = run_txl(*arguments), run_txl(*arguments)
    assert first == again
    assert first[0] == 0
    other = run_txl(*arguments, "--seed", 1)
    assert json.loads(other[1])["text"] != json.loads(first[1])["text"]
