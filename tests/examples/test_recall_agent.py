"""The example of an agent: its memory solves the task, and without memory it guesses."""

import ast
from pathlib import Path

import pytest

import txl_dist
from examples.recall_agent import NUM_CUES, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "recall_agent.py"


@pytest.mark.parametrize("mem_len", [16, 0])
def test_the_agent_remembers_with_memory_only(mem_len: int) -> None:
    reward = train(mem_len, num_windows=400)
    if mem_len:
        assert reward > 0.85
    else:
        # 320 episodes: chance is 0.25, with a standard deviation of 0.024.
        assert reward < 1 / NUM_CUES + 0.1


def test_it_is_short_and_uses_public_names_only() -> None:
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) < 200
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in imported if (node.module or "").startswith("txl_dist")}
    assert ours == {"txl_dist"}
    names = {alias.name for node in imported for alias in node.names if node.module == "txl_dist"}
    assert names <= set(txl_dist.__all__)
