"""What was removed is refused with the way that works, unless it changes nothing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from txl_dist.cli.app import main
from txl_dist.config.config_file import default_settings, load_run_config
from txl_dist.config.removed import COMMANDS, PAGE, SETTINGS, Removed, without_removed
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.training.compatibility import check_config

CONFIG = """\
directory: runs/a
data: {path: data/a}
training: {num_steps: 5, gone: VALUE}
"""


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = Removed((None, False), "start two runs")
    monkeypatch.setitem(SETTINGS, "training.gone", removed)


@pytest.mark.usefixtures("gone")
def test_a_removed_setting_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(CONFIG.replace("VALUE", "7"))
    message = "training.gone=7 was removed; start two runs \\(docs/removed.md\\)"
    with pytest.raises(ConfigError, match=message):
        load_run_config(path)


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("value", ["null", "false"])
def test_a_removed_setting_that_changes_nothing_is_ignored(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(CONFIG.replace("VALUE", value))
    assert load_run_config(path).training.num_steps == 5


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize(("value", "resumes"), [(None, True), (7, False)])
def test_so_it_is_with_the_settings_of_a_checkpoint(value: Any, resumes: bool) -> None:
    old, new = {"training.gone": value, "seed": 3}, {"seed": 3}
    assert (without_removed(old) == new) is resumes
    if resumes:
        check_config(old, default_and(new), allowed=(), checkpoint="a")
    else:
        with pytest.raises(CheckpointError, match=r"training\.gone: checkpoint 7"):
            check_config(old, default_and(new), allowed=(), checkpoint="a")


def default_and(settings: dict[str, Any]) -> dict[str, Any]:
    return {**default_settings(), **settings}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_removed_command_is_answered_by_what_to_use_instead(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *command, last = words.split()
    order = (f"{last}=1", "PATH") if last.startswith("--") else (last, "PATH")
    monkeypatch.setattr(sys, "argv", ["txl", *command, *order, "--an-option"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ConfigError.exit_code
    message = f"txl {words} was removed; {COMMANDS[words]} ({PAGE})"
    assert message in " ".join(capsys.readouterr().err.split())
