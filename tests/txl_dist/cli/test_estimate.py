"""`txl estimate`: its JSON and table, and illegal numbers of GPUs."""

import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from txl_dist.cli.app import app
from txl_dist.errors import ConfigError

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "tiny.yaml")


def estimate(*words: object) -> Result:
    return CliRunner().invoke(app, ["estimate", TINY, *map(str, words)])


def test_json_and_table_have_every_stage_and_number_of_gpus(dataset: Path) -> None:
    data = f"data.path={dataset}"
    result = estimate(data, "--gpus", "5", "--json")
    assert result.exit_code == 0, result.exception
    content = json.loads(result.stdout)
    assert content["legal_world_sizes"] == {"minimum": 1, "maximum": 5}
    (scale,) = content["scales"]
    assert (scale["gpus"], scale["lanes_per_rank"], scale["num_steps"]) == (5, 1, 20)
    assert set(scale["stages"]) == {"0", "1", "2", "3"}
    for stage in scale["stages"].values():
        memory = stage["memory"]
        assert memory["device"] == sum(
            memory[part]
            for part in ("weights", "gradients", "optimizer", "buffers", "lanes", "activations")
        )
    assert scale["days"] * 86400 == pytest.approx(20 * scale["step_seconds"])
    assert content["assumptions"]["peak_tflops"] == 19.5


@pytest.mark.slow
def test_the_table_has_a_column_per_number_of_gpus() -> None:
    options = ("model.vocab_size=256", "--gpus", "8,64,512,4096", "--lanes-per-gpu", 1)
    result = estimate(*options)
    assert result.exit_code == 0, result.exception
    gpus = next(line for line in result.stdout.splitlines() if line.startswith("GPUs"))
    assert gpus.split() == ["GPUs", "8", "64", "512", "4,096"]
    stages = [line for line in result.stdout.splitlines() if "ZeRO stage 3" in line]
    assert len(stages) == 1


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("0", "expected whole numbers of at least 1"),
        ("8,x", "expected whole numbers of at least 1"),
        ("", "expected whole numbers of at least 1"),
        ("1,6", "6 GPUs for data.num_lanes=5"),
    ],
)
def test_illegal_numbers_of_gpus_are_refused(gpus: str, message: str) -> None:
    result = estimate("model.vocab_size=256", "--gpus", gpus)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert result.stdout == ""


def test_an_unknown_vocabulary_is_refused() -> None:
    result = estimate("--gpus", "1")
    assert isinstance(result.exception, ConfigError)
    assert "add model.vocab_size=N" in str(result.exception).replace("Add", "add")


def test_importing_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, txl_dist.cli.preflight;"
        "print(*{'torch', 'pydantic', 'ruamel', 'mlflow', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_the_example_of_the_how_to_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs" / "how_to" / "estimate_a_run.md").read_text("utf-8")
    example = textwrap.dedent(text[text.index("    txl estimate") : text.index("How to read it")])
    command, _, expected = example.partition("\n\n")
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command.replace("\\\n", ""))[1:])
    assert result.exit_code == 0, result.exception
    assert result.stdout.strip() == expected.strip()
