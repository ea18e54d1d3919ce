"""The file that `txl config init` writes: the best known small setting, all of it usable."""

import re
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.manifest import load_manifest
from tests.support.prepared import prepared
from txl_dist.config.config_file import flatten_config, load_run_config, read_yaml
from txl_dist.config.data_config import MAX_LANES
from txl_dist.config.run_config import RunConfig
from txl_dist.config.starting_file import START, starting_file
from txl_dist.model.choices import RECIPES as MODEL_RECIPES
from txl_dist.training.data import TrainingData


def init(path: Path, *arguments: Any, **options: Any) -> RunConfig:
    path.write_text(starting_file("mine", *arguments, **options))
    return load_run_config(path)


@pytest.mark.parametrize(("recipe", "other"), [("modern", "paper"), ("paper", "modern")])
def test_the_starting_file_leaves_to_the_recipe_what_it_decides(
    recipe: str, other: str, tmp_path: Path
) -> None:
    given = {"recipe", *(key for section in START[recipe].values() for key in section)}
    written = read_yaml(starting_file("mine", recipe)).value
    assert {*(written["model"] or {}), *written["optimizer"]} == given
    assert init(tmp_path / "mine.yaml", recipe).warnings == []
    # So another recipe in the same file is that recipe.
    changed = load_run_config(tmp_path / "mine.yaml", [f"model.recipe={other}"])
    # But not at its rate, if the file has the other one's: that is warned of.
    assert ["size" in warning for warning in changed.warnings] == [True] * (recipe == "paper")
    named = ("name", "schedule", "gradient_clipping")
    of_other = init(tmp_path / "other.yaml", other)
    assert [getattr(changed.optimizer, name) for name in named] == [
        getattr(of_other.optimizer, name) for name in named
    ]
    for name in MODEL_RECIPES["modern"]:
        assert getattr(changed.model, name) == getattr(of_other.model, name), name


def test_the_starting_file_is_the_best_known_small_setting(tmp_path: Path) -> None:
    ours = {"directory", "seed", "data.path", "evaluation.split", "tracking.experiment"}
    settings = flatten_config(init(tmp_path / "mine.yaml"))
    quickstart = flatten_config(load_run_config("modern/quickstart"))
    assert {key for key in settings if settings[key] != quickstart[key]} == ours
    assert settings["tracking.experiment"] == "mine"
    paper, shipped = init(tmp_path / "mine.yaml", "paper"), load_run_config("quickstart")
    assert (paper.model, paper.optimizer) == (shipped.model, shipped.optimizer)
    assert paper.data == load_run_config(tmp_path / "mine.yaml", ["model.recipe=modern"]).data


def test_the_advice_for_longer_runs_has_as_many_tokens_in_a_step(tmp_path: Path) -> None:
    config = init(tmp_path / "mine.yaml")
    text = (tmp_path / "mine.yaml").read_text()
    (advice,) = re.findall(r"longer segments: (.*)\.", text)
    overrides = [f"data.{setting.replace(': ', '=')}" for setting in advice.split(", ")]
    assert [each.partition("=")[0][5:] for each in overrides] == [
        "tgt_len",
        "lanes_per_step",
        "num_lanes",
    ]
    longer = load_run_config(tmp_path / "mine.yaml", overrides)
    assert longer.data.rows * longer.data.tgt_len == config.data.rows * config.data.tgt_len
    assert longer.data.tgt_len > config.data.tgt_len
    assert longer.data.num_lanes == config.data.num_lanes == MAX_LANES
    assert "lanes_per_step: 8" not in starting_file("mine", "paper")


def test_the_starting_file_fits_its_data(tmp_path: Path) -> None:
    for tokenizer in ("byte", "word"):
        text = "to be or not to be that is the question " * 3000
        prepared(tmp_path / tokenizer, text, tokenizer=tokenizer)
    manifest = load_manifest(tmp_path / "byte")
    config = init(tmp_path / "mine.yaml", data=str(tmp_path / "byte"), manifest=manifest)
    assert config.data.path == str(tmp_path / "byte")
    # 120,000 bytes are 117 lanes of 16 segments; 96 are three turns of 32.
    assert (config.data.num_lanes, config.data.rows) == (96, 32)
    TrainingData.open(config, num_ranks=32)
    assert "lanes_per_step: 8, num_lanes: 24." in (tmp_path / "mine.yaml").read_text()
    # Words are sorted by frequency, as an adaptive softmax needs them. Here they are few.
    assert init(tmp_path / "mine.yaml").model.cutoffs == ()
    words = load_manifest(tmp_path / "word")
    assert init(tmp_path / "mine.yaml", manifest=words).model.cutoffs == ()
    many = words.model_copy(update={"vocab_size": 50_000})
    assert init(tmp_path / "mine.yaml", manifest=many).model.cutoffs == (20_000, 40_000)


def test_every_setting_in_a_comment_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(starting_file("mine"))
    settings = load_run_config(path).model_dump(mode="json")
    names = [name for section in settings.values() if isinstance(section, dict) for name in section]
    setting = re.compile(rf"^( *)# ((?:{'|'.join([*settings, *names])}): )", re.M)
    path.write_text(setting.sub(r"\1\2", path.read_text()))
    assert read_yaml(path.read_text()).value == settings
    assert load_run_config(path).model_dump(mode="json") == settings
