"""Config files: read strictly, written completely, and all problems reported together."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from txl_dist.config.config_file import (
    START,
    dump_run_config,
    flatten_config,
    load_run_config,
    starting_file,
)
from txl_dist.config.data_config import MAX_LANES, MIN_SEGMENTS, DataConfig, lanes_for
from txl_dist.config.optimizer_config import RECIPES as OPTIMIZER_RECIPES
from txl_dist.config.redaction import redact
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import DeepSpeedConfig, TrackingConfig, TrainingConfig
from txl_dist.config.yaml_file import dump_yaml, read_yaml
from txl_dist.errors import ConfigError
from txl_dist.model.choices import RECIPES as MODEL_RECIPES
from txl_dist.training.data import TrainingData

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


@pytest.mark.parametrize("text", ["yes", "on", "No", "1:30", "2024-01-01"])
def test_text_that_yaml_1_1_converts_stays_text(load: Any, text: str) -> None:
    assert read_yaml(f"a: {text}").value == {"a": text}
    assert load(SMALL, f"tracking.experiment={text}").tracking.experiment == text


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


@settings(max_examples=50)
@given(
    lr=st.floats(1e-12, 1e3),
    split=st.none() | words,
    extra=st.dictionaries(st.sampled_from(["comms_logger", "flops_profiler"]), values, max_size=2),
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


@pytest.mark.fault_row(46)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1\nb: *x", "run.yaml:1:4: not valid YAML: an anchor with an alias is not"),
        ("a: !!python/object/apply:os.system [ls]", "run.yaml:1:4: not valid YAML: a YAML tag is"),
        ("a: !new 3", "a YAML tag is not supported; write the value out"),
        ("a: !!binary 3", "a YAML tag is not supported; write the value out"),
        ("seed: 1\na: !!bool maybe", "run.yaml:2:4: not valid YAML: a YAML tag is not supported"),
        ("a: !!int 1.5", "run.yaml:1:4: not valid YAML: a YAML tag is not supported"),
        ("a: =", "run.yaml:1:4: not valid YAML"),
        ("a: &x [*x]", "not valid YAML"),
        ("seed: 1\nseed: 2", "run.yaml:2:1: not valid YAML: seed is given twice, first on line"),
        ("1: 2", "run.yaml:1:1: not valid YAML: a key must be text, found 1"),
        ("? [a]\n: 1", "a key must be text"),
        ("<<: {seed: 1}", "a key must be text"),
        ("seed: 1e999", "run.yaml: not valid YAML: Out of range float values"),
        ("seed: .inf", "run.yaml: not valid YAML: Out of range float values"),
        ("seed: " + "9" * 5000, "run.yaml: not valid YAML: Exceeds the limit"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: 'x", "run.yaml:1:6: not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("[" * 200, "not valid YAML"),
        ("- 1", "a config is a mapping of sections (data, model, training, ...), found [1]"),
        ("", "found null"),
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
        ("model.n_head=true", "model.n_head is true; it should be a valid integer"),
        ("model.mem_len=[4, 8]", "shares of it, model.mem_shares"),
        ("model.n_head=0", "model: n_head=0 must be at least 1"),
        ("model.dropout=1.0", "dropout=1.0 must be in [0, 0.99]"),
        ("optimizer.warmup_steps=5", "warmup_steps=5 is longer than training.num_steps=4"),
        (
            "optimizer={schedule: wsd, decay_steps: 3, warmup_steps: 2}",
            "warmup_steps=2 and optimizer.decay_steps=3 are together longer than",
        ),
        ("seed=-1", "seed is -1; it should be greater than or equal to 0"),
        ("tracking.experiment=3", "tracking.experiment is 3; it should be a valid string"),
        ("tracking.experiment=a/../b", "string should match pattern"),
        ("tracking.uri=./mlruns", "string should match pattern"),
        ("tracking.uri=file:///mlruns", "string should match pattern"),
        ("training.checkpoint_url=http://host", "string should match pattern '^(s3|gs)://"),
        ("data.mixture={a.b: {path: x, weight: 1}}", 'data.mixture.a.b is "a.b"; string should'),
        ("model=3", "model is a section; write its keys below it, found 3"),
        ("model.d_model.x=3", "model.d_model is"),
        ("data.path.x=3", "override data.path.x: data.path has a value: no section"),
        ("seed", "override seed: write it as section.key=value"),
        ("=1", "write it as section.key=value"),
        ("a..b=1", "write it as section.key=value"),
        ("seed=[1", "override seed: not valid YAML"),
        ("seed=*x", "override seed: not valid YAML: found undefined alias"),
        ("tracking.enabled=!!bool maybe", "not valid YAML: a YAML tag is not supported"),
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
            ("data=null", "model.n_layers=2", "training.num_steps=null", "optimizer.lr=0"),
            (
                "override data: data.path: is missing",
                "override model.n_layers: unknown key model.n_layers",
                "override training.num_steps: training.num_steps is null",
                "override optimizer.lr: optimizer.lr is 0",
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
            ("model.d_model=33", "data.num_lanes=0"),
            (
                "run.yaml:8: model: d_model=33 must be even",
                "override data.num_lanes: data.num_lanes is 0",
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
                "deepspeed.extra={fp16: 1, optimizer: 2}",
                "seed=-1",
            ),
            (
                'override deepspeed.extra: deepspeed.extra.fp16 is "fp16"; it should be \'zero_',
                'override deepspeed.extra: deepspeed.extra.optimizer is "optimizer"; it should',
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


@pytest.mark.parametrize(
    ("text", "value"),
    [("a #b", "a #b"), ("#1", "#1"), (" a# #b ", "a# #b"), ("'a #b'", "a #b"), ("a#b", "a#b")],
)
def test_a_hash_in_an_override_is_text(load: Any, text: str, value: str) -> None:
    assert load(SMALL, f"directory={text}").directory == value
    with pytest.raises(ConfigError, match='seed is "3 # x"'):
        load(SMALL, "seed=3 # x")


def test_an_override_of_a_section_replaces_earlier_overrides_in_it(load: Any) -> None:
    overrides = ("model.d_model=33", "model={d_head: 0}")
    with pytest.raises(ConfigError, match=r"^override model: model: d_head=0 must be at least 1$"):
        load(TWO_SECTIONS, *overrides)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    for name in ("quickstrat.yaml", "quickstart"):
        with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml\?"):
            load_run_config(tmp_path / name)
    with pytest.raises(ConfigError, match=r"Configs in .*quickstart\.yaml"):
        load_run_config(tmp_path / "z")
    with pytest.raises(ConfigError, match=r"Configs in .*/none: none"):
        load_run_config(tmp_path / "none" / "a.yaml")
    with pytest.raises(ConfigError, match=r"Configs in .*quickstart\.yaml"):
        load_run_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"directory: \xe9")
    with pytest.raises(ConfigError, match="cannot be read as a text file in UTF-8"):
        load_run_config(tmp_path / "latin.yaml")


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


def test_the_starting_file_fits_its_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be that is the question " * 3000)
    for tokenizer in ("byte", "word"):
        settings = PrepareSettings(tokenizer=tokenizer)
        prepare_dataset([tmp_path / "text"], tmp_path / tokenizer, settings)
    manifest = load_manifest(tmp_path / "byte")
    config = init(tmp_path / "mine.yaml", data=str(tmp_path / "byte"), manifest=manifest)
    assert config.data.path == str(tmp_path / "byte")
    # 120,000 bytes are 117 lanes of 16 segments; 96 are three turns of 32.
    assert (config.data.num_lanes, config.data.rows) == (96, 32)
    TrainingData.open(config, num_ranks=32)
    # Words are sorted by frequency, as an adaptive softmax needs them. Here they are few.
    assert init(tmp_path / "mine.yaml").model.cutoffs == ()
    words = load_manifest(tmp_path / "word")
    assert init(tmp_path / "mine.yaml", manifest=words).model.cutoffs == ()
    many = words.model_copy(update={"vocab_size": 50_000})
    assert init(tmp_path / "mine.yaml", manifest=many).model.cutoffs == (20_000, 40_000)


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


def test_every_setting_in_a_comment_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(starting_file("mine"))
    settings = load_run_config(path).model_dump(mode="json")
    names = [name for section in settings.values() if isinstance(section, dict) for name in section]
    setting = re.compile(rf"^( *)# ((?:{'|'.join([*settings, *names])}): )", re.M)
    path.write_text(setting.sub(r"\1\2", path.read_text()))
    assert read_yaml(path.read_text()).value == settings
    assert load_run_config(path).model_dump(mode="json") == settings


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
