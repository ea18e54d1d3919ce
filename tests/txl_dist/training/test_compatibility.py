"""What may change at a resume: data, settings, and what of the optimizer."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.data_commands import excerpts
from data_pipeline.shards.manifest import PrepareSettings, load_manifest
from tests.support.commands import run_txl
from tests.support.gloo_ranks import RankGroups
from tests.support.prepared import prepared
from tests.support.training_runs import (
    NO_EVALUATION,
    TinyRuns,
    refusal,
    score_of_step,
    tiny_spec,
    train,
    trained,
)
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.tensors import load_model
from txl_dist.config.config_file import default_settings, flatten_config
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.evaluation.distributed import evaluate
from txl_dist.evaluation.spec import evaluation_spec
from txl_dist.training.compatibility import check_config, check_data
from txl_dist.training.data import TrainingData
from txl_dist.training.state import load_state

COMMAND = re.compile(r"txl prepare INPUT --out NEW_DIR --tokenizer (\S+)")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text("Other text with other characters: äöü. " * 40, encoding="utf-8")
    return path


def _prepared(text: Path, out: Path, **settings: object) -> Path:
    file = settings.pop("tokenizer_file", None)
    assert file is None or isinstance(file, Path)
    prepare_dataset([text], out, PrepareSettings.model_validate(settings), tokenizer_file=file)
    return out


@pytest.fixture(scope="module")
def run(ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    trained(ranks, dataset, run, NO_EVALUATION, "training.num_steps=4", num_ranks=1)
    return run


def _mix(dataset: Path, run: Path, data: Path) -> None:
    corpora = {path.name: {"path": str(path), "weight": 1} for path in (dataset, data)}
    mixture = ("data.path=null", f"data.mixture={json.dumps(corpora)}")
    spec = tiny_spec(dataset, run, NO_EVALUATION, *mixture)
    TrainingData.open(spec.config, num_ranks=1)


def _resume(dataset: Path, run: Path, data: Path) -> None:
    checkpoint = resolve_checkpoint(run)
    manifest = load_checkpoint_manifest(checkpoint)
    spec = tiny_spec(data, run, NO_EVALUATION, allow_data_change=True)
    opened = TrainingData.open(spec.config, num_ranks=1)
    check_data(manifest, load_state(checkpoint, manifest), checkpoint, spec=spec, data=opened)


def _score(dataset: Path, run: Path, data: Path) -> None:
    find_model(run).check_data(load_manifest(data), data)


@pytest.mark.parametrize("use", [_mix, _resume, _score])
def test_the_command_in_the_error_prepares_compatible_data(
    dataset: Path, text: Path, run: Path, tmp_path: Path, use: Callable[[Path, Path, Path], None]
) -> None:
    other = _prepared(text, tmp_path / "other", tokenizer="char")
    with pytest.raises(TxlError) as caught:
        use(dataset, run, other)
    command = COMMAND.search(str(caught.value))
    assert command is not None, str(caught.value)
    compatible = _prepared(
        text, tmp_path / "compatible", tokenizer="file", tokenizer_file=Path(command[1])
    )
    use(dataset, run, compatible)


def _ids(out: Path, num_ids: int, *options: object) -> Path:
    """A dataset of ids from 1 to `num_ids`, with 0 as the end of documents unless options say."""
    source = out.with_suffix(".jsonl")
    source.write_text("".join(f'{{"ids": {[*range(1, num_ids + 1)]}}}\n' for _ in range(40)))
    vocabulary = options or ("--format", "ids", "--vocab-size", num_ids + 1, "--end-of-document", 0)
    code, output = run_txl("prepare", source, "--out", out, *vocabulary)
    assert code == 0, output
    return out


@pytest.fixture(scope="module")
def run_on_ids(ranks: RankGroups, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset of ids with names, and a run on it."""
    folder = tmp_path_factory.mktemp("ids")
    (folder / "names.json").write_text('{"End": 0, "Bar": 1}')
    options = ("--format", "ids", "--vocab-size", 32, "--end-of-document", "End")
    data = _ids(folder / "data", 31, *options, "--names", folder / "names.json")
    spec = tiny_spec(data, folder / "run", NO_EVALUATION, "training.num_steps=4")
    assert ranks(1).run(train, spec) == [0]
    return data, folder / "run"


@pytest.mark.parametrize("use", [_mix, _resume, _score])
def test_the_command_in_the_error_prepares_compatible_ids_and_names_do_not_count(
    run_on_ids: tuple[Path, Path], tmp_path: Path, use: Callable[[Path, Path, Path], None]
) -> None:
    data, run = run_on_ids
    with pytest.raises(TxlError, match="vocab_size 32 and 30") as caught:
        use(data, run, _ids(tmp_path / "other", 29))
    command = COMMAND.search(str(caught.value))
    assert command is not None, str(caught.value)
    compatible = _ids(tmp_path / "compatible", 29, "--tokenizer", command[1])
    assert excerpts(compatible, documents=1)[0].text.startswith("Bar 2 3")
    use(data, run, compatible)
    unnamed = _ids(tmp_path / "unnamed", 31)
    use(data, run, unnamed)
    # Until version 0.9, the digest of a vocabulary depended on its names.
    digest = hashlib.sha256((data / "tokenizer.json").read_bytes().strip()).hexdigest()
    old = shutil.copytree(data, tmp_path / "old")
    manifest = load_manifest(old).model_copy(update={"tokenizer_digest": digest})
    (old / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(TxlError, match="tokenizer") as caught:
        use(data, run, old)
    assert digest in str(caught.value)


@pytest.mark.fault_row(25)
def test_another_tokenizer_of_the_same_size_is_refused_even_if_data_may_change(
    ranks: RankGroups, tmp_path: Path
) -> None:
    text = "These are the same words, of as many characters. " * 20
    data = prepared(tmp_path / "data", text, tokenizer="char")
    other = prepared(tmp_path / "other", text.replace("e", "x"), tokenizer="char")
    assert load_manifest(data).vocab_size == load_manifest(other).vocab_size
    settings = (NO_EVALUATION, "training.num_steps=5")
    assert ranks(1).run(train, tiny_spec(data, tmp_path / "run", *settings)) == [0]
    spec = tiny_spec(other, tmp_path / "run", *settings, allow_data_change=True)
    assert ranks(1).run(train, spec) == [4]
    message = "another tokenizer than that of the data: the text of some ids"
    assert message in refusal(tmp_path / "run")


EXTRA = "deepspeed.extra."
REDUCTION = f"{EXTRA}communication_data_type"
REFUSED = [
    ({"model.pre_lnorm": True}, (), "model.pre_lnorm: checkpoint False, now True"),
    # Another kind of memory or another optimizer also on request.
    ({"model.memory": "tokens"}, ("model.memory",), "model.memory: checkpoint 'recurrent', now 't"),
    ({"optimizer.name": "adam"}, ("optimizer.name",), "now 'adam' -> cannot change in a run"),
    ({"optimizer.averaging": "asgd"}, ("optimizer.averaging",), "now 'asgd' -> cannot change in"),
    ({"optimizer.lr_factors.head": 2.0}, (), "now 2.0 -> --allow-change optimizer.lr_factors.head"),
    ({REDUCTION: "bf16"}, (), f"--allow-change {REDUCTION}"),
]


@pytest.mark.parametrize(("changes", "allowed", "message"), REFUSED, ids=str)
def test_settings_that_cannot_change_are_refused(
    changes: dict[str, Any], allowed: tuple[str, ...], message: str
) -> None:
    """A setting that came after the checkpoint counts as its default."""
    new = default_settings()
    for old in (new, {key: value for key, value in new.items() if key != "model.pre_lnorm"}):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            check_config(old, new | changes, allowed=allowed, checkpoint="RUN")
        check_config(old, new, allowed=(), checkpoint="RUN")


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({f"{EXTRA}zero_optimization.reduce_bucket_size": 1000}, ()),
        ({REDUCTION: "bf16"}, (REDUCTION,)),
        ({"optimizer.lr_factors.head": 2.0}, ("optimizer.lr_factors.head",)),
        # Settings of earlier versions.
        ({"training.num_tokens": 300}, ()),
        ({"ray.cpus_per_rank": 2, "ray.gpus_per_rank": 2, "ray.ranks_per_node": 4}, ()),
        ({"ray.node_labels.zone": "a", "ray.ranks_on_head": True}, ()),
        ({f"{EXTRA}prescale_gradients": True}, ()),
    ],
    ids=str,
)
def test_settings_that_may_change(changes: dict[str, Any], allowed: tuple[str, ...]) -> None:
    settings = default_settings()
    for old, new in ((settings | changes, settings), (settings, settings | changes)):
        check_config(old, new, allowed=allowed, checkpoint="RUN")


# --- the optimizer --------------------------------------------------------------------------------


def settings(*overrides: str) -> dict[str, Any]:
    return flatten_config(tiny_spec(Path("data"), Path("run"), *overrides).config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer.name=lamb",), "needs the norms of whole parameters"),
        (("optimizer.name=muon", "deepspeed.zero_stage=3"), "stage 3 cuts every one of them"),
    ],
)
def test_a_stage_that_cannot_run_the_optimizer_is_refused_with_the_reason(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*overrides)
    settings("optimizer.name=lamb", "deepspeed.zero_stage=0")
    settings("optimizer.name=muon", "deepspeed.zero_stage=2")


def test_evaluation_scores_the_average_and_a_checkpoint_names_its_states(tiny: TinyRuns) -> None:
    short = ("training.num_steps=4", "optimizer.averaging=asgd", "evaluation.max_tokens=40")
    tiny.trained(tiny.path, *short, num_ranks=1)
    log = (tiny.path / "logs" / "rank-0.log").read_text()
    assert "scores the average of the weights" in log

    path = tiny.path / "checkpoints" / "step-00000004"
    manifest = load_checkpoint_manifest(path)
    assert manifest.optimizer_states == ("average", "exp_avg", "exp_avg_sq")

    scored = score(path, tiny.dataset, "auto")
    assert scored == score(path, tiny.dataset, "averaged") != score(path, tiny.dataset, "last")
    assert score_of_step(tiny.path, 4).nats_per_token == pytest.approx(scored, rel=1e-6)

    assert tiny.ranks(1).run(train, tiny.spec(tiny.path, NO_EVALUATION, *short[:1])) == [4]
    assert "optimizer.averaging: checkpoint 'asgd', now None" in refusal(tiny.path)


def score(checkpoint: Path, dataset: Path, weights: Any) -> float:
    spec = evaluation_spec(checkpoint, dataset, batch=4, max_tokens=40, weights=weights)
    return evaluate(spec).sums.nats_per_token


def test_averaged_weights_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        load_model(save(tmp_path, step=3), weights="averaged")
