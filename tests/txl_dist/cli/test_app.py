"""Every command of `txl`: its help, and where `--json` is declared."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from tests.support.commands import run_txl, txl
from txl_dist.cli.app import app, main

CLI = Path(__file__).parents[3] / "txl_dist" / "cli"


def commands(command: click.Command, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command below `command`, such as ("data", "verify")."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words
    for name, child in (inner or {}).items():
        yield from commands(child, *words, name)


COMMANDS = list(commands(typer.main.get_command(app)))


def test_all_commands_are_found() -> None:
    assert {("train",), ("data", "verify"), ("bench", "model")} <= set(COMMANDS)
    assert len(COMMANDS) >= 17


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_an_example(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert f"Example: txl {' '.join(words)} " in " ".join(result.output.split()) + " "


def test_json_is_declared_once() -> None:
    declarations = [path.name for path in CLI.glob("*.py") if '"--json"' in path.read_text()]
    assert declarations == ["options.py"]


@pytest.mark.parametrize("words", [(), ("data",), ("train",), ("track", "sync")], ids=" ".join)
def test_the_short_option_prints_the_same_help(words: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*words, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)


def test_the_version_is_that_of_the_package() -> None:
    assert run_txl("--version") == (0, f"txl {metadata.version('txl-dist')}\n")


def test_an_error_goes_to_standard_error_with_its_exit_code(tmp_path: Path) -> None:
    ended = txl("eval", tmp_path / "nowhere", tmp_path, "--json")
    assert ended.returncode == 4
    assert ended.stdout == ""
    assert ended.stderr.startswith("CheckpointError: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --no-such", "No such option: --no-such. txl train has the options --on, --ranks, "),
        ("status --jsn", "No such option: --jsn (Possible options: --json) (see txl status -h)\n"),
        ("foo", "No such command 'foo'. txl has the commands prepare, "),
        ("data verfy x", "No such command 'verfy'. Did you mean 'verify'? (see txl data -h)\n"),
        ("data verify", "Missing argument 'DIR'. Usage: txl data verify [OPTIONS] {DIR} (see "),
        ("estimate x --gpus", "Option '--gpus' requires an argument (see txl COMMAND -h)\n"),
        ("bench model --rounds 0", "equal to 1, found 0 (see txl bench model -h)\n"),
        ("bench model --rounds x", "Invalid value for '--rounds': Input should be a valid integer"),
        ("job submit -- train x --rankz 2", "(Possible options: --ranks) (see txl train -h)\n"),
    ],
)  # fmt: skip
def test_a_usage_error_has_the_form_of_other_errors(
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["txl", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert output.err.startswith("ConfigError: ")
    assert message in output.err
    assert output.err.count("\n") == 1


def test_a_group_without_a_command_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["txl", "data"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "verify   Hash every file again" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("report",), ("status",), ("track", "sync")], ids=" ".join)
def test_what_is_no_run_directory_is_a_usage_error(words: tuple[str, ...], tmp_path: Path) -> None:
    code, output = run_txl(*words, tmp_path / "nowhere")
    assert code == 2
    assert "is not a run directory" in output


def completions(text: str) -> list[str]:
    """What a shell offers after `text`."""
    words = f"txl {text}"
    environment = {
        "_TXL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    return txl(environment=environment).stdout.split()


def test_a_shell_completes_commands_and_names_of_configs() -> None:
    assert completions("tr") == ["train", "track"]
    assert completions("estimate paper/wt103-l") == ["paper/wt103-large"]
    assert completions("train ./mine") == [], "then the shell completes files"


def test_completion_is_installed_for_the_shell_that_runs_it(tmp_path: Path) -> None:
    command = f"{sys.executable} -m txl_dist --install-completion; exit $?"
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, env=environment)
    script = tmp_path / ".bash_completions" / "txl.sh"
    assert str(script) in (tmp_path / ".bashrc").read_text()
    assert "_TXL_COMPLETE=complete_bash" in script.read_text()
