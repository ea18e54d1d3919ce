"""What is wrong with a config is reported with its origin and the supported values."""

import time
from pathlib import Path
from typing import Any

import pytest

from txl_dist.config.config_file import load_run_config
from txl_dist.errors import ConfigError

SMALL = "directory: runs/x\ndata: {path: d}\ntraining: {num_steps: 4}\n"


@pytest.mark.fault_row(46)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1\nb: *x", "run.yaml:2: not valid YAML: a YAML alias is not supported; write"),
        ("a: !!python/object/apply:os.system [ls]", "run.yaml:1: not valid YAML: a YAML tag is"),
        ("a: !!str 3", "a YAML tag is not supported; write the value out"),
        ("seed: 1\nseed: 2", "run.yaml:2: seed is given twice, first on line 1; keep one"),
        ("1: 2", "a key must be text, found '1'"),
        ("? [a]\n: 1", "a key must be text"),
        ("<<: {seed: 1}", "unknown key <<"),
        ("seed: 1e999", "too large a number"),
        ("seed: " + "9" * 5000, "too large a number"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: 'x", "run.yaml:1: not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("[" * 200, "not valid YAML"),
        ("- 1", "a config is a mapping of sections (data, model, training, ...), found a list"),
        ("", "found nothing"),
        ("x" * 300_000, "longer than 262,144 bytes"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(load: Any, text: str, expected: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert expected in str(caught.value)
    assert time.monotonic() - began < 2


@pytest.mark.fault_row(46)
def test_an_alias_bomb_is_refused(load: Any) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="alias"):
        load("\n".join(lines))


@pytest.mark.fault_row(45, 46)
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.n_layers=3", "unknown key model.n_layers; did you mean model.n_layer?"),
        ("n_layer=3", "unknown key n_layer; did you mean model.n_layer?"),
        ("zzz=3", "unknown key zzz; valid here: directory, seed"),
        ("data.reset=documnt", "'document' or 'stream'; did you mean document?"),
        ("tracking.enabled=yes", 'tracking.enabled is "yes"; it should be a valid boolean; write'),
        ("training.num_steps=1e2", "training.num_steps is 100.0; it should be a valid integer"),
        ("model.n_head='2'", "write the number without quotes"),
        ("model.n_head=true", "model.n_head is true; it should be a valid integer"),
        ("model.n_head=0", "override model.n_head: model: n_head=0 must be at least 1"),
        ("model.dropout=1.0", "dropout=1.0 must be in [0, 0.99]"),
        ("optimizer.warmup_steps=5", "warmup_steps=5 is longer than training.num_steps=4"),
        ("seed=-1", "seed is -1; it should be greater than or equal to 0"),
        ("tracking.experiment=3", "quote it: '3'"),
        ("tracking.experiment=a/../b", "must not contain '..'"),
        ("tracking.uri=./mlruns", "not a tracking server or database"),
        ("model=3", "model is a section; write its keys below it, found 3"),
        ("model.d_model.x=3", "model.d_model is"),
        ("data.path.x=3", "override data.path.x: data.path is text, not a section"),
        ("seed", "override seed: write it as section.key=value"),
        ("=1", "write it as section.key=value"),
        ("a..b=1", "write it as section.key=value"),
        ("seed=[1", "override seed: not valid YAML"),
        ("seed=*x", "override seed: not valid YAML: a YAML alias is not supported"),
    ],
)
def test_the_error_for_a_wrong_override_names_what_is_legal(
    load: Any, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMALL, override)
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_problems_are_reported_together_with_their_origins(load: Any) -> None:
    text = "data:\n  num_lanes: 0\nmodel:\n  n_layers: 2\n  tie_weight: yes\nseed: 1\nseed: 2\n"
    with pytest.raises(ConfigError) as caught:
        load(text, "optimizer.lrr=3", "oops")
    message = str(caught.value)
    assert "9 problems" in message
    for part in (
        "run.yaml:2: data.num_lanes is 0",
        "run.yaml:4: unknown key model.n_layers",
        "run.yaml:5: model.tie_weight",
        "run.yaml:7: seed is given twice",
        "override optimizer.lrr: unknown key",
        "override oops:",
        "directory is missing",
        "training is missing",
    ):
        assert part in message


TWO_SECTIONS = """directory: runs/x
data: {path: data/x}
training:
  num_steps: 50
optimizer:
  lr: 1.0e-3
  warmup_steps: 10
model:
  d_model: 32
  d_head: 8
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("optimizer.warmup_steps=99", "optimizer.min_lr=1", "data.num_lanes=0"),
            (
                "override data.num_lanes: data.num_lanes is 0",
                "override optimizer.warmup_steps, run.yaml:4: optimizer.warmup_steps=99 is longer",
                "override optimizer.min_lr, run.yaml:6: optimizer.min_lr=1.0 is above",
            ),
        ),
        (
            ("model.d_model=33", "model.n_head=0", "model.dropout=3", "model.div_val=4"),
            (
                "override model.d_model: model: d_model=33 must be even",
                "override model.n_head: model: n_head=0 must be at least 1",
                "override model.dropout: model: dropout=3.0 must be in [0, 0.99]",
                "override model.div_val: model: div_val=4 must be 1",
            ),
        ),
        (
            ("optimizer={lr: 0, beta1: 2}", "training.num_steps=-3"),
            (
                "override optimizer: optimizer.lr is 0",
                "override optimizer: optimizer.beta1 is 2",
                "override training.num_steps: training.num_steps is -3",
            ),
        ),
        (
            (
                "deepspeed.extra={fp16: 1, optimizer: 2, zero_optimization: {stage: 1}}",
                "seed=-1",
            ),
            (
                "override deepspeed.extra: deepspeed: extra.fp16 would contradict precision",
                "override deepspeed.extra: deepspeed: extra.optimizer would contradict optimizer",
                "extra.zero_optimization.stage would contradict deepspeed.zero_stage",
                "override seed: seed is -1",
            ),
        ),
    ],
)
def test_all_wrong_overrides_are_reported_with_their_origins(
    load: Any, tmp_path: Path, overrides: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(TWO_SECTIONS, *overrides)
    message = str(caught.value)
    assert f"{len(expected)} problems" in message, message
    for part in expected:
        assert part in message.replace(f"{tmp_path}/", ""), message


def test_an_override_of_a_section_replaces_earlier_overrides_in_it(load: Any) -> None:
    overrides = ("model.d_model=33", "model={d_head: 0}")
    with pytest.raises(ConfigError, match=r"^override model: model: d_head=0 must be at least 1$"):
        load(TWO_SECTIONS, *overrides)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    for name in ("quickstrat.yaml", "quickstart"):
        with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml\?"):
            load_run_config(tmp_path / name)
    with pytest.raises(ConfigError, match=r"contains: quickstart\.yaml"):
        load_run_config(tmp_path / "z")
    with pytest.raises(ConfigError, match="is not a readable directory"):
        load_run_config(tmp_path / "none" / "a.yaml")
    (tmp_path / "config.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match=r"is a directory.*did you mean .*config\.yaml"):
        load_run_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"directory: \xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_run_config(tmp_path / "latin.yaml")
