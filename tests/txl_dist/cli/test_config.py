"""`txl config`: its output, and that importing it is cheap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from txl_dist.cli.preflight import app
from txl_dist.config.config_file import dump_run_config, load_run_config
from txl_dist.errors import ConfigError

TINY = str(Path(__file__).parents[3] / "configs" / "tiny.yaml")


def test_show_prints_the_resolved_config_with_overrides() -> None:
    result = CliRunner().invoke(app, ["show", TINY, "optimizer.lr=1e-3", "model.n_layer=6"])
    assert result.exit_code == 0
    expected = load_run_config(TINY, ["optimizer.lr=1e-3", "model.n_layer=6"])
    assert result.stdout == dump_run_config(expected)
    assert yaml.safe_load(result.stdout)["model"]["n_layer"] == 6


def test_show_as_json_is_one_object_without_secrets() -> None:
    result = CliRunner().invoke(app, ["show", TINY, "--json", "tracking.uri=http://u:CANARY@h"])
    assert json.loads(result.stdout)["tracking"]["uri"] == "http://***@h"


def test_validate_reports_a_valid_config() -> None:
    result = CliRunner().invoke(app, ["validate", TINY])
    assert (result.exit_code, "is a valid config" in result.stdout) == (0, True)
    result = CliRunner().invoke(app, ["validate", TINY, "--json"])
    assert json.loads(result.stdout)["valid"] is True


def test_init_writes_a_valid_config_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "my-run.yaml"
    result = CliRunner().invoke(app, ["init", str(tmp_path / "my-run"), "--json"])
    assert json.loads(result.stdout) == {"config": str(path)}
    assert load_run_config(path).directory == "runs/my-run"

    path.write_text("mine")
    result = CliRunner().invoke(app, ["init", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert "exists already" in str(result.exception)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["a b", "..", ".hidden", "a: b", "", "no/such/directory"])
def test_init_refuses_names_that_are_no_file_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", name])
    assert isinstance(result.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["show", "validate"])
def test_an_invalid_config_ends_with_exit_code_2(command: str) -> None:
    result = CliRunner().invoke(app, [command, TINY, "model.n_layers=6"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    assert result.stdout == ""


def test_importing_the_commands_imports_nothing_heavy() -> None:
    code = (
        "import sys, txl_dist.cli.preflight;"
        "print(*{'torch', 'pydantic', 'ruamel', 'mlflow', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
