"""`txl reproduce`: from files as they are published to a score, by the documented commands."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.commands import txl
from txl_dist.cli.app import app
from txl_dist.cli.reproduce import CONFIGS
from txl_dist.config.config_file import load_run_config
from txl_dist.errors import ConfigError, DataError
from txl_dist.reproduction.experiments import EXPERIMENTS

SMALL = (
    "model.n_layer=1",
    "model.d_model=8",
    "model.n_head=2",
    "model.d_head=4",
    "model.d_inner=16",
    "model.mem_len=5",
    "data.num_lanes=2",
    "data.tgt_len=7",
    "training.num_steps=3",
    "optimizer.warmup_steps=0",
    "evaluation.max_tokens=50",
    "tracking.enabled=false",
)


def text(num_words: int) -> str:
    """Lines of frequent and rare words."""
    rng = random.Random(3)
    words = [f"w{int(rng.paretovariate(0.8)) % 300}" for _ in range(num_words)]
    return "".join(f" {' '.join(words[i : i + 11])} \n" for i in range(0, num_words, 11))


def test_every_experiment_has_a_config_and_every_config_an_experiment() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        config = load_run_config(CONFIGS / f"{name}.yaml")
        assert config.optimizer.schedule_of_paper_code
        assert experiment.tgt_len <= config.data.tgt_len
        assert (experiment.published is None) == (experiment.table == "")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["enwik9"], ConfigError, "expected one of wt103-base"),
        (["enwik8-base"], ConfigError, "--data DIR. Source: mattmahoney.net"),
        (["wt103-base", "--data", "."], DataError, "has no wiki.train.tokens"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(
    words: list[str],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["enwik8-base", "wt103-base"])
def test_an_experiment_runs_from_its_files_to_its_score(name: str, tmp_path: Path) -> None:
    data = tmp_path / "unpacked" / "archive"
    data.mkdir(parents=True)
    if name == "enwik8-base":
        (data / "enwik8").write_text(text(2000))
        settings = SMALL
    else:
        for split, size in (("train", 2000), ("valid", 300), ("test", 200)):
            (data / f"wiki.{split}.tokens").write_text(text(size))
        settings = (*SMALL, "model.cutoffs=[20,40]")
    command = (
        *("reproduce", name, *settings, "--data", data.parent, "--out", tmp_path / "out"),
        *("--on", "processes", "--json"),
    )
    ended = txl(*command)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result == json.loads((tmp_path / "out" / "reproduction.json").read_text())
    assert result["published"] == EXPERIMENTS[name].published
    evaluated = result["evaluation"]
    assert evaluated["same_length"] is True
    assert evaluated["mem_len"] == EXPERIMENTS[name].mem_len
    assert evaluated["tokens_scored"] > 50, "the whole test split"

    again = txl(*command)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["score"] == result["score"]
