"""Config files: read strictly, written completely, and all problems reported together."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_dist.config.config_file import (
    dump_run_config,
    dump_yaml,
    flatten_config,
    load_run_config,
    read_yaml,
)
from txl_dist.config.data_config import MAX_LANES, MIN_SEGMENTS, DataConfig, lanes_for
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import (
    OPTIMIZER_RECIPES,
    DeepSpeedConfig,
    TrackingConfig,
    TrainingConfig,
)
from txl_dist.errors import ConfigError
from txl_dist.model.choices import RECIPES as MODEL_RECIPES

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
words = _text | st.sampled_from(["no", "1e3", "010", "1:30", "null", "~", "a: b", "# x", "<<", "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
SMALL = "directory: runs/x\ndata: {path: d}\ntraining: {num_steps: 4}\n"


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_every_config_of_the_repository_is_valid_without_warning_and_survives_a_dump(
    path: Path, tmp_path: Path
) -> None:
    config = load_run_config(path)
    assert config.warnings == []
    (tmp_path / "dumped.yaml").write_text(dump_run_config(config))
    assert load_run_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 0.001), (".5", 0.5), ("+1.5E+2", 150.0), ("1_000.5", 1000.5)),
        # Text that YAML 1.1 converts.
        *((text, text) for text in ("yes", "on", "No", "1:30", "2024-01-01")),
        # A hash is no comment in an override.
        *(("a #b", "a #b"), ("#1", "#1"), (" a# #b ", "a# #b"), ("'a #b'", "a #b"), ("a#b", "a#b")),
    ],
)
def test_a_value_is_read_as_yaml_1_2_and_a_hash_in_an_override_is_text(
    load: Any, text: str, value: str | float
) -> None:
    name = "directory" if isinstance(value, str) else "optimizer.lr"
    assert flatten_config(load(SMALL, f"{name}={text}"))[name] == value
    if "#" not in text:
        assert read_yaml(f"a: {text}").value == {"a": value}


def test_a_recipe_gives_what_the_file_leaves_out(load: Any) -> None:
    paper = load(SMALL)
    modern = load(SMALL, "model.recipe=modern", "model.norm=layernorm", "optimizer.lr=0.5")
    for name, value in (MODEL_RECIPES["modern"] | {"norm": "layernorm"}).items():
        assert getattr(modern.model, name) == value, name
    for name, value in (OPTIMIZER_RECIPES["modern"] | {"lr": 0.5}).items():
        assert getattr(modern.optimizer, name) == value, name
    # What the file sets is kept, and what no recipe names is the default of all.
    assert modern.model.n_layer == paper.model.n_layer
    assert modern.optimizer.warmup_steps == paper.optimizer.warmup_steps
    assert load(SMALL, "model.recipe=paper") == paper


def test_a_path_below_the_home_directory_is_stored_resolved(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load(SMALL, "directory=~/run", "data.path=~/d", "init_from=~/m")
    assert (config.directory, config.data.path) == ("/home/me/run", "/home/me/d")
    assert config.init_from == "/home/me/m"
    mixture = load(SMALL, "data={mixture: {a: {path: ~/d, weight: 1}}}").data.mixture
    assert mixture["a"].path == "/home/me/d"


def test_an_override_reaches_every_depth_and_the_last_one_counts(load: Any) -> None:
    config = load(
        SMALL + "evaluation:\n",
        "optimizer.lr=1",
        "optimizer.lr=1e-3",
        "deepspeed.extra.comms_logger.list=[1, {a: b}]",
        "evaluation.split=valid",
        "training={num_steps: 9, log_interval_steps: 2}",
        "model.d_embed=null",
    )
    assert config.optimizer.lr == 0.001
    assert config.deepspeed.extra == {"comms_logger": {"list": [1, {"a": "b"}]}}
    assert config.evaluation.split == "valid"
    assert (config.training.num_steps, config.training.log_interval_steps) == (9, 2)


# --- writing --------------------------------------------------------------------------------------


@given(st.dictionaries(words, values, max_size=4))
def test_written_yaml_is_read_back_equal(value: dict[str, Any]) -> None:
    document = read_yaml(dump_yaml(value))
    assert json.dumps(document.value if value else {}) == json.dumps(value)


def test_a_flat_config_has_every_setting_under_its_dotted_name() -> None:
    config = load_run_config(CONFIGS / "tiny.yaml", ["deepspeed.extra.comms_logger.b=[1, 2]"])
    flat = flatten_config(config)
    assert flat["optimizer.lr"] == 0.01
    assert flat["model.d_embed"] is None
    assert flat["deepspeed.extra.comms_logger.b"] == "[1, 2]"
    assert all(isinstance(value, str | int | float | None) for value in flat.values())
    assert list(flat) == list(flatten_config(config))


@pytest.mark.fault_row(44)
def test_no_secret_reaches_a_dump_a_repr_a_flat_config_or_an_error(load: Any) -> None:
    config = RunConfig(
        directory="runs/x",
        data=DataConfig(path="d"),
        training=TrainingConfig(num_steps=1),
        tracking=TrackingConfig(uri="http://me:CANARY@host:5000?token=CANARY"),
        deepspeed=DeepSpeedConfig(
            extra={"comms_logger": {"api_key": "CANARY", "aToken": ["CANARY"]}}
        ),
    )
    with pytest.raises(ConfigError) as caught:
        load(SMALL, "tracking.uri=file://me:CANARY@x", "data.api_key=CANARY", "data.token=CANARY")
    written = [dump_run_config(config), repr(config), str(config), str(flatten_config(config))]
    for text in [*written, str(caught.value)]:
        assert "CANARY" not in text
        assert "***" in text or "unknown key" in text


# --- problems, with their origin and the supported values ----------------------------------------

ALIAS_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
)


@pytest.mark.fault_row(46)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1\nb: *x", "run.yaml:1:4: not valid YAML: an anchor is not supported; write"),
        ("a: !!python/object/apply:os.system [ls]", "run.yaml:1:4: not valid YAML: a YAML tag is"),
        ("a: !new 3", "a YAML tag is not supported; write the value out"),
        ("a: =", "run.yaml:1:4: not valid YAML"),
        ("a: &x [*x]", "not valid YAML"),
        ("seed: 1\nseed: 2", "run.yaml:2:1: not valid YAML: seed is given twice, first on line"),
        ("1: 2", "run.yaml:1:1: not valid YAML: a key must be text, found 1"),
        ("? [a]\n: 1", "a key must be text"),
        ("seed: 1e999", "run.yaml:1:7: not valid YAML: seed is 1e999. A number must be finite"),
        ("a:\n  b: [1.5, -.Inf]", "run.yaml:2:12: not valid YAML: a.b[1] is -.Inf. A number must"),
        ("seed: " + "9" * 5000, "run.yaml: not valid YAML: Exceeds the limit"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: 'x", "run.yaml:1:6: not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("[" * 200, "not valid YAML"),
        ("- 1", "a config is a mapping of sections (data, model, training, ...), found [1]"),
        ("", "found null"),
        ("x" * 300_000, "longer than 262,144 bytes"),
        pytest.param(ALIAS_BOMB, "an anchor is not supported", id="alias bomb"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(load: Any, text: str, expected: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert expected in str(caught.value)
    assert time.monotonic() - began < 2


@pytest.mark.fault_row(45, 46)
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.n_layers=3", "unknown key model.n_layers; did you mean model.n_layer?"),
        ("n_layer=3", "unknown key n_layer; did you mean model.n_layer?"),
        ("training.precision=bf16", "did you mean precision?"),
        ("training.seed=1", "did you mean seed?"),
        ("optimizer.learning_rate=1", "did you mean optimizer.lr?"),
        ("data.batch_size=1", "did you mean data.num_lanes, or data.lanes_per_step?"),
        ("trainin.lr=1", "override trainin.lr: unknown key trainin; did you mean training?"),
        ("model={d_model: 33}", "override model: model: d_model=33 must be even"),
        ("model.d_model=33", "override model.d_model: model: d_model=33 must be even"),
        ("data.num_lanes=100000000000000000000", "data.num_lanes is 100000000000000000000; it"),
        ("optimizer.lr=.nan", "override optimizer.lr: not valid YAML: the value is .nan. A number"),
        ("zzz=3", "unknown key zzz; all settings: txl config show quickstart"),
        ("model.vocab_size=null", "a model of vectors, for a loop of your own"),
        ("model.recipe=modrn", "recipe='modrn' must be one of paper, modern"),
        ("optimizer.lr_factors.hid=2", "it should be 'hidden', 'embedding', 'head' or 'other'"),
        ("optimizer.lr_factors.head=-1", "optimizer.lr_factors.head is -1; it should be greater"),
        ("deepspeed.extra.fp16=1", "; it should be 'zero_optimization', 'communication_data_type'"),
        ("optimizer.lr=0", "optimizer.lr is 0; it should be greater"),
        ("data.reset=documnt", "it should be 'document' or 'stream'"),
        ("tracking.enabled=yes", 'tracking.enabled is "yes"; it should be a valid boolean'),
        ("training.num_steps=1e2", "training.num_steps is 100.0; it should be a valid integer"),
        ("model.n_head='2'", 'model.n_head is "2"; it should be a valid integer'),
        ("model.mem_len=[4, 8]", "shares of it, model.mem_shares"),
        ("model.n_head=0", "model: n_head=0 must be at least 1"),
        ("model.dropout=1.0", "dropout=1.0 must be in [0, 0.99]"),
        ("optimizer.warmup_steps=5", "warmup_steps=5 is longer than training.num_steps=4"),
        (
            "optimizer={schedule: wsd, decay_steps: 3, warmup_steps: 2}",
            "warmup_steps=2 and optimizer.decay_steps=3 are together longer than",
        ),
        ("seed=-1", "seed is -1; it should be greater than or equal to 0"),
        ("tracking.experiment=a/../b", 'is "a/../b"; expected letters, digits'),
        ("tracking.uri=foo", "expected the address of a server or database, such as http://HOST"),
        ("tracking.uri=file:///mlruns", "; expected the address of a server or database"),
        ("training.checkpoint_url=http://host", "; expected a URL such as s3://BUCKET/PATH or gs:"),
        ("data.mixture={a.b: {path: x, weight: 1}}", 'data.mixture.a.b is "a.b"; string should'),
        ("model=3", "model is a section; write its keys below it, found 3"),
        ("data.path.x=3", "override data.path.x: data.path has a value: no section"),
        ("seed", "override seed: write it as section.key=value"),
        ("=1", "write it as section.key=value"),
        ("seed=[1", "override seed: not valid YAML"),
        ("seed=*x", "override seed: not valid YAML: an alias is not supported"),
        ("seed=3 # x", 'seed is "3 # x"'),
    ],
)
def test_the_error_for_a_wrong_override_names_what_is_legal(
    load: Any, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMALL, override)
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2


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
            ("data=null", "model.n_layers=2", "optimizer={lr: 0, beta1: 2}"),
            (
                "override data: data.path: is missing",
                "override model.n_layers: unknown key model.n_layers",
                "override optimizer: optimizer.lr is 0",
                "override optimizer: optimizer.beta1 is 2",
            ),
        ),
        (
            ("optimizer.warmup_steps=99", "optimizer.min_lr=1"),
            (
                "run.yaml: optimizer.warmup_steps=99 is longer than training.num_steps=50",
                "run.yaml: optimizer.min_lr=1.0 is above optimizer.lr=0.001",
            ),
        ),
        (
            ("model.d_model=33", "deepspeed.extra={fp16: 1, optimizer: 2}"),
            (
                "run.yaml:8: model: d_model=33 must be even",
                'override deepspeed.extra: deepspeed.extra.fp16 is "fp16"; it should be \'zero_',
                'override deepspeed.extra: deepspeed.extra.optimizer is "optimizer"; it should',
            ),
        ),
    ],
)
def test_all_wrong_overrides_are_reported_with_their_origins(
    load: Any, tmp_path: Path, overrides: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(TWO_SECTIONS, *overrides)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert f"{len(expected)} problems" in message, message
    for part in expected:
        assert part in message


def test_an_override_of_a_section_replaces_earlier_overrides_in_it(load: Any) -> None:
    overrides = ("model.d_model=33", "model={d_head: 0}")
    with pytest.raises(ConfigError, match=r"^override model: model: d_head=0 must be at least 1$"):
        load(TWO_SECTIONS, *overrides)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    for name in ("quickstrat.yaml", "quickstart"):
        with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml\?"):
            load_run_config(tmp_path / name)
    for path in (tmp_path / "z", tmp_path / "none" / "a.yaml"):
        with pytest.raises(ConfigError, match=r"does not exist.*: txl config list"):
            load_run_config(path)
    with pytest.raises(ConfigError, match=r"is a directory, not a config file.*: txl config list"):
        load_run_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"directory: \xe9")
    with pytest.raises(ConfigError, match="cannot be read as a text file in UTF-8"):
        load_run_config(tmp_path / "latin.yaml")


@given(
    num_tokens=st.integers(2, 10**7) | st.none(), rows=st.integers(1, 40), tgt_len=st.integers(1, 9)
)
def test_every_lane_of_the_rule_has_enough_segments(
    num_tokens: int | None, rows: int, tgt_len: int
) -> None:
    lanes, per_step = lanes_for(num_tokens, rows=rows, tgt_len=tgt_len)
    data = DataConfig(path="d", num_lanes=lanes, lanes_per_step=per_step, tgt_len=tgt_len)
    assert 1 <= data.rows <= rows
    assert data.num_lanes == data.rows * data.num_turns <= MAX_LANES
    enough = MIN_SEGMENTS * tgt_len
    if num_tokens is not None and lanes > 1:
        assert num_tokens >= lanes * enough
    # One turn more would be too many.
    if num_tokens is None or num_tokens >= (lanes + data.rows) * enough:
        assert lanes + data.rows > MAX_LANES


def test_a_section_whose_settings_are_all_comments_has_its_defaults(load: Any) -> None:
    empty = "".join(f"{name}:\n" for name in ("model", "optimizer", "divergence", "ray"))
    assert load(SMALL + empty) == load(SMALL)


# --- warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        # What `config init` wrote once: the rate of AdamW as if somebody had chosen it.
        (("model.recipe=modern", "optimizer.lr=1e-3"), "lr=0.001 .*muon .*AdamW's size"),
        (("model.recipe=modern", "optimizer.lr=2.5e-4", "model.d_model=1024"), "AdamW's size"),
        (("model.recipe=modern", "optimizer.name=adamw"), "lr=0.008 .*adamw .*Muon's size"),
        (("optimizer.lr=8e-3",), "Muon's size"),
        (("model.recipe=modern",), None),
        (("model.recipe=modern", "optimizer.lr=4e-3"), None),
        (("model.recipe=modern", "optimizer.name=adamw", "optimizer.lr=4e-3"), None),
        (("model.recipe=modern", "model.d_model=16", "model.d_head=2"), None),
        (("model.d_model=16", "optimizer.lr=1e-2"), None),
        (("optimizer.name=lamb", "optimizer.lr=1e-2", "deepspeed.zero_stage=0"), None),
    ],
)
def test_a_rate_of_another_optimizer_is_warned_of(
    load: Any, overrides: tuple[str, ...], warning: str | None
) -> None:
    warnings = load(SMALL, *overrides).warnings
    assert len(warnings) == (warning is not None)
    assert warning is None or re.search(warning, warnings[0])


def test_a_recipe_without_effect_is_warned_of(load: Any, tmp_path: Path) -> None:
    """A run's config.yaml gives the same run again, so it lists what its recipe decided."""
    for recipe, other in (("modern", "paper"), ("paper", "modern")):
        config = load(SMALL, f"model.recipe={recipe}")
        path = tmp_path / "config.yaml"
        path.write_text(dump_run_config(config))
        assert load_run_config(path) == config
        assert load_run_config(path).warnings == []
        (warning,) = load_run_config(path, [f"model.recipe={other}"]).warnings
        assert f"model.recipe={other} has nearly no effect" in warning


# --- what a config says of its steps --------------------------------------------------------------


def test_a_step_is_divided_into_segments_of_equal_length(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"tgt_len=10 .*backprop_segments=4 segments"):
        load(SMALL, "model.mem_len=8", "data.tgt_len=10", "training.backprop_segments=4")
    config = load(SMALL, "model.mem_len=8", "data.tgt_len=12", "training.backprop_segments=3")
    assert config.segment_len == 4


def test_every_step_reads_as_many_lanes(load: Any) -> None:
    turns = ("data.num_lanes=12", "data.lanes_per_step=4", "data.tgt_len=11")
    data = load(SMALL, *turns).data
    assert (data.rows, data.num_turns, data.tokens_per_step) == (4, 3, 44)
    with pytest.raises(ConfigError, match=r"lanes_per_step=4 does not divide data.num_lanes=10"):
        load(SMALL, *turns, "data.num_lanes=10")
    with pytest.raises(ConfigError, match=r"micro_batch_lanes=5 is above data.lanes_per_step=4"):
        load(SMALL, *turns, "training.micro_batch_lanes=5")
