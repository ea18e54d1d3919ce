"""`txl generate` as a command."""

import inspect
import json
from pathlib import Path

import pytest

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import train_tokenizer
from tests.support.commands import run_txl, txl
from tests.support.small_models import small_model
from txl_dist.cli.models import generate
from txl_dist.convert.stored_model import Reading, write_exported
from txl_dist.generation.text import Sampling, TextLimits


@pytest.fixture
def word_model(tmp_path: Path) -> Path:
    settings = PrepareSettings(tokenizer="word")
    tokenizer = train_tokenizer(settings, lambda: iter(["the cat sat on the mat\n"]))
    model = small_model(vocab_size=tokenizer.vocab_size).float()
    write_exported(tmp_path / "words", model, tokenizer, Reading(tgt_len=6, reset="stream"))
    return tmp_path / "words"


def test_the_defaults_are_those_of_python() -> None:
    options = {name: each.default for name, each in inspect.signature(generate).parameters.items()}
    sampling = {name: options[name] for name in ("temperature", "top_k", "top_p")}
    assert Sampling(**sampling) == Sampling()
    assert TextLimits(max_tokens=options["max_tokens"]) == TextLimits()


def test_unknown_words_are_said_with_their_number(word_model: Path, tmp_path: Path) -> None:
    command = ("generate", word_model, "--max-tokens", 3)
    prompt = ("--prompt", "the dog sat, the dog slept")
    words = "4 symbols not in the vocabulary, read as the unknown token: 'dog' (2 times), 'sat,', "
    for options in ((), ("--json",)):
        ended = txl(*command, *prompt, *options)
        assert (ended.returncode, ended.stderr.count(words)) == (0, 1), ended.stderr
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\nthe dog\n")
    ended = txl(*command, "--prompts", prompts)
    assert ended.stderr.count("1 symbol not in the vocabulary") == 1


def test_the_same_seed_generates_the_same_text(run: Path) -> None:
    arguments = ("generate", run, "--prompt", "def f(", "--max-tokens", 12, "--json")
    first, again = run_txl(*arguments), run_txl(*arguments)
    assert first == again
    assert first[0] == 0
    other = run_txl(*arguments, "--seed", 1)
    assert json.loads(other[1])["text"] != json.loads(first[1])["text"]
    assert run_txl(*arguments[:-1]) == (0, "def f(" + json.loads(first[1])["text"] + "\n")


def test_a_file_of_prompts_gives_the_text_of_each_prompt_alone(run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
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


def test_ids_are_given_and_read_as_prompts_and_a_stop_token_can_be_a_text(
    run: Path, tmp_path: Path
) -> None:
    whole = json.loads(run_txl("generate", run, "--max-tokens", 40, "--json")[1])
    ids = whole["ids"]
    assert bytes(ids).decode("utf-8", errors="replace") == whole["text"]
    assert len(ids) == whole["num_tokens"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"ids": [100, 101]}\n{"prompt": "de"}\n')
    options = ("--prompts", prompts, "--temperature", 0, "--max-tokens", 5)
    of_ids, of_text = map(json.loads, run_txl("generate", run, *options)[1].splitlines())
    assert of_ids["ids"] == of_text["ids"]
    assert of_ids["prompt"] == [100, 101]
    stop = next(id_ for id_ in ids if chr(id_).isascii() and chr(id_).isalpha())
    for token in (stop, chr(stop)):
        stopped = run_txl("generate", run, "--max-tokens", 40, "--json", "--stop-token", token)
        assert json.loads(stopped[1])["ids"] == ids[: ids.index(stop)]


def test_what_cannot_be_generated_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    for second, cause in (
        ('{"prompt": 1}', "has the type int"),
        ('{"ids": [1, 257]}', "of 257 ids"),
    ):
        prompts.write_text(f'{{"prompt": "x"}}\n{second}\n')
        code, message = run_txl("generate", run, "--prompts", prompts)
        assert (code, f"{prompts}, line 2: " in message) == (3, True)
        assert cause in message
    for words, reason in (
        (("--prompts", prompts, "--prompt", "x"), "give one of them"),
        (("--stop", ""), "a stop string is empty"),
        (("--stop-token", 257), "nor one of its 257 ids"),
        (("--stop-token", "ab"), "--stop-token 'ab' is not one token of this model"),
    ):
        code, message = run_txl("generate", run, *words)
        assert (code, reason in message) == (2, True), message
