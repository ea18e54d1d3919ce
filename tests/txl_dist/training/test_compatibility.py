"""Data of another tokenizer is refused, with the command that prepares compatible data."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.data_commands import excerpts
from data_pipeline.shards.manifest import PrepareSettings, load_manifest
from tests.support.commands import run_txl
from tests.support.gloo_ranks import RankGroups
from tests.support.training_runs import NO_EVALUATION, tiny_spec, train
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.config.config_file import default_settings
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError, TxlError
from txl_dist.runtime.world import World
from txl_dist.training.compatibility import check_config, check_data
from txl_dist.training.data import TrainingData
from txl_dist.training.rank import train_rank
from txl_dist.training.spec import TrainSpec
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
    spec = tiny_spec(dataset, run, NO_EVALUATION, "training.num_steps=4")
    assert ranks(1).run(train, spec) == [0]
    return run


def _mix(dataset: Path, run: Path, data: Path) -> None:
    corpora = {path.name: {"path": str(path), "weight": 1} for path in (dataset, data)}
    mixture = ("data.path=null", f"data.mixture={json.dumps(corpora)}")
    spec = tiny_spec(dataset, run, NO_EVALUATION, *mixture)
    TrainingData.open(spec.config, num_ranks=1)


def _resume(dataset: Path, run: Path, data: Path) -> None:
    checkpoint = resolve_checkpoint(run)
    opened = TrainingData.open(tiny_spec(data, run, NO_EVALUATION).config, num_ranks=1)
    manifest = load_checkpoint_manifest(checkpoint)
    check_data(
        manifest, load_state(checkpoint, manifest), opened.phase, opened.corpora[0].tokenizer,
        allowed=(), allow_data_change=True, checkpoint=checkpoint,
    )  # fmt: skip


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


def prepare(out: Path, text: str) -> Path:
    """A dataset with a tokenizer of the characters of `text`."""
    corpus = out.with_suffix(".txt")
    corpus.write_text(text)
    prepare_dataset([corpus], out, PrepareSettings(tokenizer="char"))
    return out


def refusal_of(world: World, spec: TrainSpec) -> str:
    """The message of the CheckpointError; empty if there is none."""
    try:
        train_rank(spec, world)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.fault_row(25)
def test_another_tokenizer_of_the_same_size_is_refused_even_if_data_may_change(
    ranks: RankGroups, tmp_path: Path
) -> None:
    text = "These are the same words, of as many characters. " * 20
    data = prepare(tmp_path / "data", text)
    other = prepare(tmp_path / "other", text.replace("e", "x"))
    assert load_manifest(data).vocab_size == load_manifest(other).vocab_size
    settings = (NO_EVALUATION, "training.num_steps=5")
    assert ranks(1).run(refusal_of, tiny_spec(data, tmp_path / "run", *settings)) == [""]
    spec = tiny_spec(other, tmp_path / "run", *settings, allow_data_change=True)
    [message] = ranks(1).run(refusal_of, spec)
    assert "another tokenizer than that of the data: the text of some ids" in message
    assert ranks(1).run(train, spec) == [4]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ray.cpus_per_rank", 2),
        ("training.num_tokens", 300),
        ("ray.gpus_per_rank", 2),
        ("ray.node_labels.zone", "a"),
        ("ray.ranks_on_head", True),
        ("ray.ranks_per_node", 4),
        ("deepspeed.extra.prescale_gradients", True),
    ],
)
def test_a_run_with_a_setting_of_an_earlier_version_resumes(key: str, value: object) -> None:
    new = default_settings()
    check_config({**new, key: value}, new, allowed=(), checkpoint="RUN")


def test_a_setting_that_came_after_the_checkpoint_counts_as_its_default() -> None:
    new = default_settings()
    older = {key: value for key, value in new.items() if key != "model.pre_lnorm"}
    check_config(older, new, allowed=(), checkpoint="RUN")
    with pytest.raises(CheckpointError, match="pre_lnorm: checkpoint False, now True"):
        check_config(older, {**new, "model.pre_lnorm": True}, allowed=(), checkpoint="RUN")


def test_a_checkpoint_of_another_kind_of_memory_is_refused_even_on_request() -> None:
    old = default_settings()
    changed = {**old, "model.memory": "tokens"}
    with pytest.raises(CheckpointError, match=r"model\.memory: checkpoint 'recurrent', now 't"):
        check_config(old, changed, allowed=("model.memory",), checkpoint="RUN")


def test_options_of_deepspeed_are_free_unless_they_change_numbers() -> None:
    old, prefix = default_settings(), "deepspeed.extra."
    changed = {**old, f"{prefix}zero_optimization.reduce_bucket_size": 1000}
    check_config(old, changed, allowed=(), checkpoint="RUN")
    key = f"{prefix}communication_data_type"
    with pytest.raises(CheckpointError, match=f"--allow-change {key}"):
        check_config(old, {**old, key: "bf16"}, allowed=(), checkpoint="RUN")
    check_config(old, {**old, key: "bf16"}, allowed=(key,), checkpoint="RUN")
