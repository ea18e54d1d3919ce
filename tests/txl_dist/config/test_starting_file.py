"""The starting file is a valid config, and its comments have the documented default settings."""

import re
from pathlib import Path

from txl_dist.config.config_file import default_settings, flatten_config, load_run_config
from txl_dist.config.starting_file import START, starting_file
from txl_dist.config.yaml_file import read_yaml

REQUIRED = {
    "directory": "runs/mine",
    "data.path": "data/mine",
    **{
        f"{section}.{name}": value
        for section, each in START.items()
        for name, value in each.items()
    },
}


def test_it_has_the_default_of_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(starting_file("mine"))
    assert flatten_config(load_run_config(path)) == default_settings() | REQUIRED


def test_every_setting_in_a_comment_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(starting_file("mine"))
    settings = load_run_config(path).model_dump(mode="json")
    names = [name for section in settings.values() if isinstance(section, dict) for name in section]
    setting = re.compile(rf"^( *)# ((?:{'|'.join([*settings, *names])}): )", re.M)
    path.write_text(setting.sub(r"\1\2", path.read_text()))
    assert read_yaml(path.read_text()).value == settings
    assert load_run_config(path).model_dump(mode="json") == settings


def test_every_setting_is_documented() -> None:
    lines = starting_file("mine").splitlines()
    settings = [i for i, line in enumerate(lines) if re.match(r" *(# )?\w+: ", line)]
    assert len(settings) > 70
    for i in settings:
        assert re.match(r" *# .*[a-z`]", lines[i - 1]), lines[i]
