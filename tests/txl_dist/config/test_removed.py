"""What was removed is refused with the way that works, unless it changes nothing."""

import sys
from contextlib import nullcontext
from typing import Any

import pytest

from txl_dist.cli.app import main
from txl_dist.config.config_file import default_settings
from txl_dist.config.removed import COMMANDS, PAGE, SETTINGS, Removed, without_removed
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.training.compatibility import check_config

SMALL = "directory: runs/a\ndata: {path: data/a}\ntraining: {num_steps: 5}\n"


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "training.gone", Removed((None, False), "start two runs"))


def test_a_removed_setting_is_ignored_if_it_changes_nothing_else_refused_with_advice(
    load: Any,
) -> None:
    for value in ("null", "false"):
        assert load(SMALL, f"training.gone={value}") == load(SMALL)
    message = r"training\.gone=7 was removed; start two runs \(docs/removed\.md\)"
    with pytest.raises(ConfigError, match=message):
        load(SMALL, "training.gone=7")


@pytest.mark.parametrize(("value", "resumes"), [(None, True), (7, False)])
def test_so_it_is_with_the_settings_of_a_checkpoint(value: Any, resumes: bool) -> None:
    old, new = {"training.gone": value, "seed": 3}, {"seed": 3}
    assert (without_removed(old) == new) is resumes
    error = pytest.raises(CheckpointError, match=r"training\.gone: checkpoint 7")
    with nullcontext() if resumes else error:
        check_config(old, default_settings() | new, allowed=(), checkpoint="a")


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
