"""Every command of `txl`: its help, and where `--json` is declared."""

import errno
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from tests.support.commands import ENVIRONMENT, run_txl, txl
from tests.support.documents import leaf_commands
from txl_dist.cli import preflight
from txl_dist.cli.app import app, main

CLI = Path(__file__).parents[3] / "txl_dist" / "cli"


COMMANDS = [tuple(words.split()) for words in leaf_commands(typer.main.get_command(app))]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_an_example(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert f"Example: txl {' '.join(words)} " in " ".join(result.output.split()) + " "


GROUPS = [(), *sorted({words[:-1] for words in COMMANDS if len(words) > 1})]


@pytest.mark.parametrize("words", [*GROUPS, *COMMANDS], ids=" ".join)
def test_help_fits_a_terminal_of_80_columns(words: tuple[str, ...]) -> None:
    """No summary is cut, and no word is: --max-tokens stays one."""
    text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
    summaries = text.partition("Commands:")[2].splitlines()
    assert not [line for line in summaries if line.endswith("...")]
    assert not re.findall(r"\S*[\w-]-$", text, re.M)
    assert max(map(len, text.splitlines())) <= 80


def run_main(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["txl", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
    ids=["no place for files", "full disk", "failing disk"],
)
def test_a_file_that_cannot_be_written_ends_with_path_reason_and_advice(
    error: OSError | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path("/proc/txl.yaml") if error is None else tmp_path / "a.yaml"
    if error is not None:
        monkeypatch.setattr("os.fsync", Mock(side_effect=error))
    assert run_main(monkeypatch, "config", "init", path) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"TxlError: {path}: {reason}. ")
    assert "then run the command again" in printed.err
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_system_that_names_no_file_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    monkeypatch.setattr(preflight, "write_file", Mock(side_effect=reset))
    with pytest.raises(ConnectionResetError):
        run_main(monkeypatch, "config", "init", tmp_path / "a")


def test_an_output_on_a_full_disk_ends_with_the_reason_alone() -> None:
    command = [sys.executable, "-m", "txl_dist", "config", "list"]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("TxlError: the output: No space left on device. ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_the_terminal_cannot_show_is_escaped(encoding: str, tmp_path: Path) -> None:
    folder = tmp_path / "b\xfccher → 日本\udcff"  # \udcff: a byte that is not UTF-8
    folder.mkdir()
    command = [sys.executable, "-m", "txl_dist", "config", "init", folder / "a"]
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": encoding}
    for code in (0, 2):  # the second time the file exists
        ended = subprocess.run(command, check=False, capture_output=True, env=environment)
        assert ended.returncode == code, ended.stderr
        expected = str(folder).encode(encoding, errors="backslashreplace")
        assert expected in ended.stdout + ended.stderr


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
        ("train --no-such", "No such option: --no-such (see txl train -h)"),
        ("status --jsn", "No such option: --jsn (Possible options: --json) (see txl status -h)"),
        ("data verfy x", "No such command 'verfy'. Did you mean 'verify'? (see txl data -h)"),
        ("data verify", "Missing argument 'DIR' (see txl data verify -h)"),
        ("estimate x --gpus", "Option '--gpus' requires an argument (see txl COMMAND -h)"),
        ("bench eval-speed --rounds 0", "equal to 1, found 0 (see txl bench eval-speed -h)"),
        (
            "report x --out .",
            "'--out': '.' is a directory; give the path of a file to write (see txl report -h)",
        ),
        (
            "estimate x --gpus 1 --peak-tflops inf",
            "equal to 1000000, found inf (see txl estimate -h)",
        ),
        (
            "prepare x --out y --shard-size 9999999",
            "equal to 1048576, found 9999999 (see txl prepare -h)",
        ),
        ("job submit -- train x --rankz 2", "(Possible options: --ranks) (see txl train -h)"),
    ],
)
def test_a_usage_error_has_the_form_of_other_errors(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, *words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ConfigError: ")
    assert printed.err.endswith(f"{message}\n")
    assert printed.err.count("\n") == 1


def test_a_group_without_a_command_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "data") == 2
    assert "verify   Hash every file again" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("report",), ("status",), ("track", "sync")], ids=" ".join)
def test_what_is_no_run_directory_is_a_usage_error(words: tuple[str, ...], tmp_path: Path) -> None:
    code, output = run_txl(*words, tmp_path / "nowhere")
    assert code == 2
    assert "is not a run directory" in output


def test_a_shell_completes_commands() -> None:
    environment = {"_TXL_COMPLETE": "complete_bash", "COMP_WORDS": "txl tr", "COMP_CWORD": "1"}
    assert txl(environment=environment).stdout.split() == ["train", "track"]
