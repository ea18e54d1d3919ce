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
    assert run_txl(*arguments[:-1]) == (0, "def f(" + json.loads(first[1])["text"] + "\n")


def test_a_file_of_prompts_gives_the_text_of_each_prompt_alone(run: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("def f(\nimport\nx\n")
    options = ("--max-tokens", 12, "--stop", "e")
    code, output = run_txl("generate", run, "--prompts", prompts, *options, "--seed", 4)
    assert code == 0
    results = [json.loads(line) for line in output.splitlines()]
    assert [result["line"] for result in results] == [1, 2, 3]
    for result in results:
        alone = ("--prompt", result["prompt"], "--seed", result["seed"], "--json")
        expected = json.loads(run_txl("generate", run, *options, *alone)[1])
        assert result["text"] == expected["text"]
        assert "e" not in result["text"]
    more = ("--out", out, "--batch", 2, "--seed", 4)
    assert run_txl("generate", run, "--prompts", prompts, *options, *more)[0] == 0
    assert out.read_text() == output


def test_what_cannot_be_generated_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n{"prompt": 1}\n')
    code, message = run_txl("generate", run, "--prompts", prompts)
    assert (code, f"{prompts}, line 2: " in message) == (3, True)
    for words, reason in (
        (("--prompts", prompts, "--prompt", "x"), "give one of them"),
        (("--out", tmp_path / "out"), "--out needs --prompts"),
        (("--prompts", prompts, "--out", tmp_path / "no" / "out"), "cannot be written"),
        (("--stop", ""), "a stop string is empty"),
        (("--stop-token", 257), "--stop-token 257: expected an id from 0 to 256"),
    ):
        code, message = run_txl("generate", run, *words)
        assert (code, reason in message) == (2, True), message
