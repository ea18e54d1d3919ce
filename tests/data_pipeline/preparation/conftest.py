"""Inputs for the tests of preparation."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A folder of JSON lines with repeats, and text files, one of them larger than a shard."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in ("a", "b"):
        texts = (f"document {number % 37} of {name} " * (number % 7 + 1) for number in range(60))
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in texts)
        )
    (folder / "giant.txt").write_text("grün " * 2000)
    (folder / "small.txt").write_text("document 3 of a " * 4)
    return folder
