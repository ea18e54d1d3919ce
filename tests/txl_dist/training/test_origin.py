"""`init_from`: a run that starts from the weights of a stored model."""

import json
import shutil
from contextlib import chdir, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from tests.support.commands import run_txl
from tests.support.prepared import prepared
from tests.support.training_runs import ZERO, TinyRuns, losses, refusal, score_of_step, train
from txl_dist.analysis.model_card import _training
from txl_dist.analysis.run_report import read_run, run_page
from txl_dist.analysis.run_status import read_status, status_lines
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.tensors import Fragment, load_fragments, load_model
from txl_dist.config.config_file import dump_run_config
from txl_dist.config.config_file import load_run_config as load_plain
from txl_dist.convert.hub import write_for_transformers
from txl_dist.convert.stored_model import Reading, find_model, write_exported
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.evaluation.distributed import evaluate
from txl_dist.evaluation.spec import evaluation_spec
from txl_dist.events import newest_attempt, read_events
from txl_dist.model.choices import RECIPES
from txl_dist.model.config import ModelConfig, RotaryScaling
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.origin import check_origin, find_origin, load_run_config
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import load_state

# B 2, T 3, M 5, and no two sizes of the model are equal.
SIZES = {"n_layer": 3, "d_model": 10, "n_head": 2, "d_head": 6, "d_inner": 14, "mem_len": 5}
MAX_TOKENS = 100
CONFIG = """
directory: {run}
data: {{path: {data}, num_lanes: 2, tgt_len: 3}}
optimizer: {{lr: 0.01, schedule: constant}}
training: {{num_steps: 4, log_interval_steps: 1, checkpoint_interval_steps: 2,
  keep_checkpoints: 9, rank_timeout_seconds: 60.0}}
evaluation: {{interval_steps: 4, batch_chunks: 4, max_tokens: {max_tokens}}}
tracking: {{enabled: false}}
"""


def export(directory: Path, dataset: Path, *, seed: int = 11, **settings: Any) -> Path:
    manifest = load_manifest(dataset)
    config = ModelConfig(vocab_size=manifest.vocab_size, **{**SIZES, **settings})
    model = TransformerXL(config, seed=seed)
    write_exported(
        directory, model, open_tokenizer(dataset, manifest), Reading(tgt_len=3, reset="document")
    )
    return directory


@pytest.fixture
def origin(dataset: Path, tmp_path: Path) -> Path:
    return export(tmp_path / "origin", dataset)


def spec_of(tiny: TinyRuns, run: str | Path, *overrides: str, **options: Any) -> TrainSpec:
    run = tiny.path / run
    path = run.parent / f"{run.name}.yaml"
    path.write_text(CONFIG.format(run=run, data=tiny.dataset, max_tokens=MAX_TOKENS))
    return TrainSpec(config=load_run_config(path, overrides), **options)


def started(
    tiny: TinyRuns, run: str | Path, *overrides: str, num_ranks: int = 1, **options: Any
) -> None:
    spec = spec_of(tiny, run, *overrides, **options)
    assert tiny.ranks(num_ranks).run(train, spec) == [0] * num_ranks


def weights(path: Path) -> dict[str, Tensor]:
    stored = find_model(path)
    return {name: p.detach() for name, p in stored.load(stored.config)[0].named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def score(path: Path, dataset: Path, *, num_ranks: int = 1, tgt_len: int | None = None) -> float:
    spec = evaluation_spec(path, dataset, batch=4, max_tokens=MAX_TOKENS, tgt_len=tgt_len)
    return evaluate(replace(spec, num_ranks=num_ranks)).sums.nats


@pytest.mark.parametrize(
    ("num_ranks", "stage"), [(1, "0"), (2, "0"), (2, "1"), (2, "2"), (2, "3"), (2, "3-all-spread")]
)
def test_a_run_has_the_weights_and_the_score_of_its_origin_at_every_stage(
    tiny: TinyRuns, origin: Path, num_ranks: int, stage: str
) -> None:
    run = tiny.path / "run"
    started(tiny, run, f"init_from={origin}", "seed=5", *ZERO[stage], num_ranks=num_ranks)

    first = CheckpointDirectory(run).at(0)
    assert same(weights(first), weights(origin))
    assert not same(weights(CheckpointDirectory(run).at(2)), weights(origin))
    assert score_of_step(run, 0).nats == score(origin, tiny.dataset, num_ranks=num_ranks)
    manifest = load_checkpoint_manifest(first)
    assert load_state(first, manifest).tokens == 0
    for name, entry in manifest.parameters.items():
        states = {key: torch.ones(entry.shape).flatten() for key in ("exp_avg", "exp_avg_sq")}
        master = torch.zeros(entry.shape).flatten()
        load_fragments(first, manifest, [Fragment(name, entry.shape, 0, master, states)])
        assert not any(state.any() for state in states.values())


def test_a_run_its_best_checkpoint_and_its_average_can_be_origins(
    tiny: TinyRuns, origin: Path
) -> None:
    first = tiny.path / "first"
    settings = (f"init_from={origin}", "optimizer.averaging=asgd", "optimizer.lr=30")
    started(tiny, first, *settings)
    # The rate is far too high, so the best weights are those of the start.
    assert (first / "BEST").read_text() == "checkpoints/step-00000000\n"
    # A run that was killed between its first score and its first checkpoint begins again.
    again, name = tiny.path / "again", "evaluations/step-00000000.json"
    (again / "evaluations").mkdir(parents=True)
    shutil.copy(first / name, again / name)
    started(tiny, again, *settings)
    assert (again / "BEST").read_text() == "checkpoints/step-00000000\n"
    for number, path in enumerate((first, first / "BEST", CheckpointDirectory(first).at(2))):
        run = tiny.path / f"run-{number}"
        started(tiny, run, f"init_from={path}", "training.num_steps=1", num_ranks=2)
        assert same(weights(CheckpointDirectory(run).at(0)), weights(path))
        assert score_of_step(run, 0).nats == score(path, tiny.dataset, num_ranks=2)
        state = load_state(run, load_checkpoint_manifest(CheckpointDirectory(run).at(1)))
        assert state.origin is not None
        assert state.origin.path == str(find_model(path).path)


@pytest.mark.parametrize("kind", ["imported", "transformers"])
def test_weights_of_other_programs_can_be_an_origin(tiny: TinyRuns, kind: str) -> None:
    """Those of `txl import` have no tokenizer: only the size of the vocabulary can be compared."""
    manifest, origin, run = load_manifest(tiny.dataset), tiny.path / kind, tiny.path / "run"
    sizes: dict[str, Any] = {"vocab_size": manifest.vocab_size, "same_length": True, **SIZES}
    if kind == "imported":
        write_exported(origin, TransformerXL(ModelConfig(**sizes), seed=2), None)
    else:
        model = TransformerXL(ModelConfig.of_recipe("modern", **sizes), seed=3)
        tokenizer, window = open_tokenizer(tiny.dataset, manifest), SIZES["mem_len"]
        write_for_transformers(origin, model, tokenizer, 3, window=window, card=None)
    started(tiny, run, f"init_from={origin}", "training.num_steps=1", num_ranks=2)
    assert same(weights(CheckpointDirectory(run).at(0)), weights(origin))
    assert score_of_step(run, 0).nats == score(origin, tiny.dataset, num_ranks=2, tgt_len=3)


@pytest.mark.parametrize(
    "stage", ["0", *(pytest.param(s, marks=pytest.mark.slow) for s in ("2", "3")), "3-all-spread"]
)
def test_a_resume_needs_no_origin_and_keeps_what_is_frozen(
    tiny: TinyRuns, origin: Path, stage: str
) -> None:
    settings = (f"init_from={origin}", "optimizer.lr_factors={hidden: 0}", "seed=5", *ZERO[stage])
    straight, stopped = tiny.path / "straight", tiny.path / "stopped"
    started(tiny, straight, *settings, num_ranks=2)
    first = spec_of(tiny, stopped, *settings, "training.num_steps=2")
    assert tiny.ranks(2).run(train, first) == [0, 0]
    expected = weights(origin)
    shutil.rmtree(origin)
    allowed = {"allow_change": ("training.num_steps",)}
    started(tiny, stopped, *settings, **allowed, num_ranks=2)
    assert losses(stopped) == losses(straight)

    last = weights(CheckpointDirectory(stopped).at(4))
    assert same(last, weights(CheckpointDirectory(straight).at(4)))
    for name, weight in last.items():
        is_hidden = name.endswith(".weight") and name.startswith("layers.") and "norm" not in name
        assert torch.equal(weight, expected[name]) == is_hidden, name
    # On another number of ranks, and at another stage.
    more = (*settings, *ZERO["1"], "training.num_steps=5")
    started(tiny, stopped, *more, **allowed)
    moved = weights(CheckpointDirectory(stopped).at(5))
    assert all(
        torch.equal(moved[name], expected[name]) == torch.equal(last[name], expected[name])
        for name in moved
    )


def stop_after_first_save(world: World, spec: TrainSpec) -> None:
    """Kill the run during the evaluation before the first step, as far as its files show it."""
    fail = Mock(side_effect=KeyboardInterrupt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txl_dist.training.rank.build_evaluator", lambda *_: fail)
        with pytest.raises(KeyboardInterrupt):
            train(world, spec)


def test_a_run_that_was_killed_before_its_first_step_resumes_without_the_origin(
    tiny: TinyRuns, origin: Path
) -> None:
    run, expected = tiny.path / "run", score(origin, tiny.dataset)
    spec = spec_of(tiny, run, f"init_from={origin}")
    assert tiny.ranks(1).run(stop_after_first_save, spec) == [None]
    assert CheckpointDirectory(run).steps() == [0]
    assert not (run / "evaluations" / "step-00000000.json").exists()
    shutil.rmtree(origin)
    started(tiny, run, f"init_from={origin}")
    assert score_of_step(run, 0).nats == expected
    assert list(losses(run)) == [1, 2, 3, 4]


def test_the_origin_of_a_run_is_fixed(tiny: TinyRuns, origin: Path) -> None:
    run = tiny.path / "run"
    started(tiny, run, f"init_from={origin}", "training.num_steps=1")
    other = export(tiny.path / "other", tiny.dataset, seed=4)
    for settings in ((f"init_from={other}",), tuple(f"model.{k}={v}" for k, v in SIZES.items())):
        spec = spec_of(tiny, run, "training.num_steps=1", *settings)
        assert tiny.ranks(1).run(train, spec) == [4]
        assert "init_from: checkpoint" in refusal(run)
        assert "begin a new one in another directory" in refusal(run)


# --- the config -----------------------------------------------------------------------------------


def test_a_config_is_completed_and_stays_so_in_the_run_directory(tiny: TinyRuns) -> None:
    origin = export(tiny.path / "origin", tiny.dataset, norm="rmsnorm", tie_weight=False)
    run = tiny.path / "run"
    spec = spec_of(tiny, run, f"init_from={origin}", "model.dropout=0.1", "training.num_steps=1")
    expected = replace(find_model(origin).config, dropout=0.1)
    assert spec.config.model == expected
    assert not any("recipe" in warning for warning in spec.config.warnings)
    assert tiny.ranks(1).run(train, spec) == [0]
    shutil.rmtree(origin)
    written = (run / "config.yaml").read_text()
    assert written == dump_run_config(spec.config)
    assert f"init_from: {origin}" in written
    assert load_plain(run / "config.yaml") == load_run_config(run / "config.yaml") == spec.config


def test_the_optimizer_is_that_of_the_recipe_of_the_config(tiny: TinyRuns) -> None:
    origin = export(tiny.path / "origin", tiny.dataset, recipe="modern", **RECIPES["modern"])
    plain = spec_of(tiny, "a", f"init_from={origin}").config
    modern = spec_of(tiny, "b", f"init_from={origin}", "model.recipe=modern").config
    assert replace(plain.model, recipe="modern") == modern.model == find_model(origin).config
    assert (plain.optimizer.name, modern.optimizer.name) == ("adamw", "muon")


def test_every_command_sees_the_complete_config(tiny: TinyRuns, origin: Path) -> None:
    run = tiny.path / "run"
    started(tiny, run, f"init_from={origin}")
    new = tiny.path / "new"
    words = (tiny.path / "run.yaml", f"init_from={origin}", f"directory={new}")
    code, output = run_txl("config", "show", *words, "--json")
    assert (code, json.loads(output)["model"]["n_layer"]) == (0, 3)
    assert run_txl("config", "validate", *words)[0] == 0
    code, output = run_txl("estimate", *words, "data.path=none", "--gpus", "1", "--json")
    assert code == 0, output
    assert json.loads(output)["num_parameters"] == sum(x.numel() for x in weights(origin).values())
    start = (*words, "--on", "processes", "--dry-run")
    assert run_txl("train", *start)[0] == 0
    assert run_txl("train", *start, "model.d_inner=3")[0] == 2

    shutil.rmtree(origin)
    assert run_txl("config", "show", *words)[0] == run_txl("train", *start)[0] == 4
    assert run_txl("train", *start, f"directory={run}")[0] == 0
    fork = ("--resume", CheckpointDirectory(run).at(2))
    assert run_txl("train", *start, *fork)[0] == 0


def test_all_contradictions_are_named_at_once(tiny: TinyRuns, origin: Path) -> None:
    wrong = ("model.n_layer=4", "model.norm=rmsnorm", "model.vocab_size=9")
    with pytest.raises(ConfigError) as error:
        spec_of(tiny, "run", f"init_from={origin}", "model.d_head=6", *wrong)
    text = str(error.value)
    assert f"the weights of {origin}" in text
    assert "model.n_layer=4, and the model has 3" in text
    assert "model.norm='rmsnorm', and the model has 'layernorm'" in text
    assert "model.vocab_size=9, and the model has" in text
    assert "d_head" not in text


def test_what_changes_no_weights_may_differ(tiny: TinyRuns, origin: Path) -> None:
    other = (
        "mem_len=7", "mem_shares=[0.5, 1]", "same_length=true", "clamp_len=4", "dropout=0.1",
        "dropatt=0.2", "attention=reference", "init_std=0.5",
    )  # fmt: skip
    run = tiny.path / "run"
    settings = (f"init_from={origin}", "training.num_steps=1", "data.tgt_len=4")
    started(tiny, run, *settings, *(f"model.{each}" for each in other))
    assert same(weights(CheckpointDirectory(run).at(0)), weights(origin))
    learned = export(tiny.path / "shaw", tiny.dataset, distance_encoding="shaw", clamp_len=4)
    with pytest.raises(ConfigError, match=r"model\.clamp_len=3, and the model has 4"):
        spec_of(tiny, "b", f"init_from={learned}", "model.clamp_len=3")


@given(names=st.sets(st.sampled_from(sorted(asdict(ModelConfig())))))
def test_any_part_of_the_model_may_be_in_the_config(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("origin")
    stored = ModelConfig(
        vocab_size=23, cutoffs=(5, 9), div_val=2, tie_projs=(True,), distance_encoding="rotary",
        n_kv_head=1, rotary_scaling=RotaryScaling(kind="linear", factor=2.0), **SIZES,
    )  # fmt: skip
    write_exported(folder / "model", TransformerXL(stored), None)
    values = json.loads(json.dumps(asdict(stored)))
    given_part = [f"model.{name}={json.dumps(values[name])}" for name in names]
    path = folder / "run.yaml"
    path.write_text("directory: run\ndata: {path: data}\ntraining: {num_steps: 1}\n")
    config = load_run_config(path, [f"init_from={folder / 'model'}", *given_part])
    assert config.model == stored


def test_a_setting_of_the_model_that_is_invalid_is_explained_with_its_line(
    tiny: TinyRuns, origin: Path
) -> None:
    with pytest.raises(ConfigError, match=r"override model\.n_layer: model\.n_layer is \"x\""):
        spec_of(tiny, "run", f"init_from={origin}", "model.n_layer=x")
    with pytest.raises(ConfigError, match=r"init_from is 3; it should be a valid string"):
        spec_of(tiny, "run", "init_from=3")


# --- what is refused ------------------------------------------------------------------------------


def test_a_missing_or_foreign_model_is_refused_by_its_name(tiny: TinyRuns) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        spec_of(tiny, "run", f"init_from={tiny.path / 'nowhere'}")
    (tiny.path / "foreign").mkdir()
    (tiny.path / "foreign" / "config.json").write_text('{"model_type": "another"}')
    with pytest.raises(ConfigError, match=r"foreign/config\.json: model_type is 'another'"):
        spec_of(tiny, "run", f"init_from={tiny.path / 'foreign'}")


@pytest.mark.parametrize("is_missing", [True, False])
def test_missing_or_damaged_weights_leave_the_run_directory_unchanged(
    tiny: TinyRuns, origin: Path, is_missing: bool
) -> None:
    run = tiny.path / "run"
    spec = spec_of(tiny, run, f"init_from={origin}")
    file = origin / "model.safetensors"
    content = file.read_bytes()
    file.unlink() if is_missing else file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert tiny.ranks(2).run(train, spec) == [4, 4]
    assert str(file) in refusal(run)
    assert not {"config.yaml", "metrics.jsonl", "checkpoints"} & {p.name for p in run.iterdir()}
    shutil.rmtree(origin)
    export(origin, tiny.dataset)
    assert tiny.ranks(2).run(train, spec) == [0, 0]


def test_an_origin_below_the_home_directory_gives_its_settings(
    tiny: TinyRuns, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny.path))
    config = spec_of(tiny, "run", f"init_from=~/{origin.name}").config
    assert (config.init_from, config.model.d_inner) == (str(origin), SIZES["d_inner"])
    with pytest.raises(ConfigError, match="is the directory of the run"):
        spec_of(tiny, "run", f"init_from=~/{origin.name}", f"directory=~/{origin.name}")


def test_data_of_another_tokenizer_is_refused_with_the_command_that_prepares_it(
    tiny: TinyRuns, tmp_path: Path
) -> None:
    """Also one with as many ids."""
    for name, word in (("own", "abcd "), ("other", "efgh "), ("larger", "abcde ")):
        texts = [word * (100 + number) for number in range(4)]
        prepared(tmp_path / name, *texts, split={"valid": 0.3}, tokenizer="char")
    origin = export(tmp_path / "origin", tmp_path / "own")
    advice = f"--tokenizer {origin / 'tokenizer.json'}"
    for name in ("other", "larger"):
        spec = spec_of(replace(tiny, dataset=tmp_path / name), "run", f"init_from={origin}")
        data = TrainingData.open(spec.config, num_ranks=1)
        with pytest.raises(DataError, match=f"txl prepare .* {advice}"):
            check_origin(spec, data)
        assert tiny.ranks(2).run(train, spec) == [3, 3]
        assert advice in refusal(tmp_path / "run")
    spec = spec_of(replace(tiny, dataset=tmp_path / "own"), "run", f"init_from={origin}")
    check_origin(spec, TrainingData.open(spec.config, num_ranks=1))


def find_in_own_folder(world: World, spec: TrainSpec, folder: Path) -> str:
    config = spec.config.model_copy(update={"init_from": "model"})
    data = TrainingData.open(config, num_ranks=1)
    with chdir(folder / str(world.rank)), pytest.raises(CheckpointError) as caught:
        find_origin(config, data, world)
    return str(caught.value)


def test_ranks_that_find_different_models_are_refused(tiny: TinyRuns, origin: Path) -> None:
    for rank in range(2):
        (tiny.path / str(rank)).mkdir()
        export(tiny.path / str(rank) / "model", tiny.dataset, seed=rank)
    spec = spec_of(tiny, "run", f"init_from={origin}")
    messages = tiny.ranks(2).run(find_in_own_folder, spec, tiny.path)
    assert all("different models in model (sha256: rank 0 " in each for each in messages)
    shutil.rmtree(tiny.path / "1" / "model")
    messages = tiny.ranks(2).run(find_in_own_folder, spec, tiny.path)
    assert all("model does not exist" in each for each in messages)


# --- the record -----------------------------------------------------------------------------------


def tags_of_tracking(world: World, spec: TrainSpec) -> dict[str, str]:
    """Train with a tracker that records its tags only: MLflow takes seconds to import."""
    tags: dict[str, str] = {}

    def record(*args: Any, **options: Any) -> Any:
        tags.update(options["tags"])
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txl_dist.training.rank.TrackingProcess", record)
        assert train(world, spec) == 0
    return tags


def test_the_origin_is_recorded_and_shown_also_after_a_resume(tiny: TinyRuns, origin: Path) -> None:
    run = tiny.path / "run"
    expected = f"{origin} (sha256 {find_model(origin).digest})"
    tracked = "tracking.enabled=true"
    for num_steps in (1, 2):
        spec = spec_of(
            tiny, run, f"init_from={origin}", tracked, f"training.num_steps={num_steps}",
            allow_change=("training.num_steps",),
        )  # fmt: skip
        (tags,) = tiny.ranks(1).run(tags_of_tracking, spec)
        assert tags["origin"] == expected
        attempt = newest_attempt(read_events(run))
        assert attempt is not None
        assert attempt.origin == expected
        shutil.rmtree(origin, ignore_errors=True)
    (status,) = read_status([run])
    assert status.origin == expected
    assert any(expected in line for line in status_lines(status))
    assert expected in run_page([read_run(run)])
    path = CheckpointDirectory(run).at(2)
    manifest = load_checkpoint_manifest(path)
    rows = dict(_training(run, manifest, load_state(path, manifest)))
    assert rows["started from"] == f"the weights of {expected}"
    assert load_model(path)[2].run["init_from"] == str(origin)
