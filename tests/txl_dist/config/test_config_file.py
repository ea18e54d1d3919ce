"""Config files: read strictly, written completely, and all problems reported together."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.txl_dist.config.test_strict_yaml import values, words
from txl_dist.config.config_file import dump_run_config, flatten_config, load_run_config, redact
from txl_dist.config.data_config import DataConfig
from txl_dist.config.deepspeed_config import DeepSpeedConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.config.strict_yaml import read_yaml
from txl_dist.config.training_config import TrackingConfig, TrainingConfig
from txl_dist.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
SMALL = "directory: runs/x\ndata: {path: d}\ntraining: {num_steps: 4}\n"


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_every_config_of_the_repository_is_valid_and_survives_a_dump(
    path: Path, tmp_path: Path
) -> None:
    config = load_run_config(path)
    (tmp_path / "dumped.yaml").write_text(dump_run_config(config))
    assert load_run_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("+1.5E+2", 150.0),
        ("2", 2.0),
        ("1_000.5", 1000.5),
    ],
)
def test_common_notations_of_numbers_are_read(load: Any, text: str, value: float) -> None:
    assert load(SMALL, f"optimizer.lr={text}").optimizer.lr == value


@pytest.mark.parametrize("text", ["yes", "on", "No", "0x10", "010", "1:30", "2024-01-01", ".inf"])
def test_text_that_yaml_1_1_converts_stays_text(load: Any, text: str) -> None:
    assert read_yaml(f"a: {text}").value == {"a": text}
    if text[0] != ".":  # An experiment's name begins with a letter or a digit.
        assert load(SMALL, f"tracking.experiment={text}").tracking.experiment == text


def test_an_override_reaches_every_depth_and_the_last_one_counts(load: Any) -> None:
    config = load(
        SMALL + "evaluation:\n",
        "optimizer.lr=1",
        "optimizer.lr=1e-3",
        "deepspeed.extra.aio.list=[1, {a: b}]",
        "evaluation.split=valid",
        "training={num_steps: 9, log_interval_steps: 2}",
        "model.d_embed=null",
    )
    assert config.optimizer.lr == 0.001
    assert config.deepspeed.extra == {"aio": {"list": [1, {"a": "b"}]}}
    assert config.evaluation.split == "valid"
    assert (config.training.num_steps, config.training.log_interval_steps) == (9, 2)


# --- writing --------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    lr=st.floats(1e-12, 1e3),
    split=st.none() | words,
    extra=st.dictionaries(st.sampled_from(["aio", "comet"]), values, max_size=2),
)
def test_a_dumped_config_loads_as_the_same_config(
    tmp_path_factory: pytest.TempPathFactory, lr: float, split: str | None, extra: dict[str, Any]
) -> None:
    config = load_run_config(CONFIGS / "tiny.yaml")
    config = config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update={"lr": lr}),
            "evaluation": config.evaluation.model_copy(update={"split": split}),
            "deepspeed": DeepSpeedConfig(extra=extra),
        }
    )
    if redact(config.model_dump()) != config.model_dump():
        return  # Text that looks like a secret is not written.
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(dump_run_config(config), encoding="utf-8")
    assert load_run_config(path) == config


def test_a_flat_config_has_every_setting_under_its_dotted_name() -> None:
    config = load_run_config(CONFIGS / "tiny.yaml", ["deepspeed.extra.aio.b=[1, 2]"])
    flat = flatten_config(config)
    assert flat["optimizer.lr"] == 0.01
    assert flat["model.d_embed"] is None
    assert flat["deepspeed.extra.aio.b"] == "[1, 2]"
    assert all(isinstance(value, str | int | float | None) for value in flat.values())
    assert list(flat) == list(flatten_config(config))


@pytest.mark.fault_row(44)
def test_no_secret_reaches_a_dump_a_repr_a_flat_config_or_an_error(load: Any) -> None:
    config = RunConfig(
        directory="runs/x",
        data=DataConfig(path="d"),
        training=TrainingConfig(num_steps=1),
        tracking=TrackingConfig(uri="http://me:CANARY@host:5000?token=CANARY"),
        deepspeed=DeepSpeedConfig(extra={"wandb": {"api_key": "CANARY", "authToken": ["CANARY"]}}),
    )
    with pytest.raises(ConfigError) as caught:
        load(SMALL, "tracking.uri=file://me:CANARY@x", "data.api_key=CANARY", "data.token=CANARY")
    written = [dump_run_config(config), repr(config), str(config), str(flatten_config(config))]
    for text in [*written, str(caught.value)]:
        assert "CANARY" not in text
        assert "***" in text or "unknown key" in text
