"""`txl eval` and `txl generate` read a model in either format, and only data of its tokenizer.

Export and import as commands: the written model equals the read one, complete or not at all.
"""

import json
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.tokenizers import ByteTokenizer
from tests.support.commands import run_txl
from tests.support.exported_model import tide_dataset
from tests.support.replayed_models import OWN_HF, golden_files, hf_directories, original_arguments
from tests.support.small_models import MODERN, random_text, read_stream, small_model
from tests.txl_dist.checkpoint import saving
from tests.txl_dist.convert.example_files import hf_copy, hf_weights, load
from txl_dist.config.removed import SETTINGS
from txl_dist.convert.original_model import read_model
from txl_dist.convert.stored_model import (
    find_model,
    write_exported,
)
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.transformer_xl import TransformerXL

TEXT = ("--prompt", "def ", "--max-tokens", 9, "--temperature", 2, "--json")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return tide_dataset(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saving.save(tmp_path / "run", step=2)
    return tmp_path / "run"


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    assert run_txl("export", run, "--out", tmp_path / "exported")[0] == 0
    return tmp_path / "exported"


def json_of(*words: object) -> dict[str, Any]:
    """The JSON that a command prints, without the path of the model."""
    code, output = run_txl(*words)
    assert code == 0, output
    result = json.loads(output)
    result.pop("checkpoint")
    return result


@pytest.mark.parametrize("options", [(), ("--mem-len", 3, "--clamp-len", 2), ("--same-length",)])
def test_an_export_scores_as_its_checkpoint(
    run: Path, exported: Path, dataset: Path, options: tuple[object, ...]
) -> None:
    checkpoint = json_of("eval", run, dataset, "--json", *options)
    assert checkpoint["tgt_len"] == 4
    export = json_of("eval", exported, dataset, "--json", *options)
    for score in (checkpoint, export):
        # Of the files, which differ; the protocol names them.
        assert score.pop("model_sha256")[:12] in score["protocol"]
        score["protocol"] = re.sub("model [^,]*,", "", score["protocol"])
    assert export == checkpoint


def test_an_export_reads_and_writes_as_its_checkpoint(run: Path, exported: Path) -> None:
    assert json_of("generate", exported, *TEXT) == json_of("generate", run, *TEXT)
    stored = find_model(exported)
    assert (stored.tgt_len, stored.reset) == (4, "document")


@pytest.mark.parametrize("options", MODERN.values(), ids=MODERN)
def test_an_export_of_any_block_has_the_same_numbers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = small_model(**options).float()
    write_exported(tmp_path / "model", model, None)
    loaded, _ = load(tmp_path / "model")
    assert loaded.config == model.config
    text_BN = random_text(2, 7)
    assert torch.equal(*(read_stream(each, text_BN, tgt_len=3)[0] for each in (loaded, model)))


def test_an_export_that_does_not_fit_on_the_disk_ends_with_its_reason(
    run: Path, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        code, output = run_txl("export", run, "--out", tmp_path / "exported")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3
    assert f"{tmp_path}/exported: writing the model failed: File too large" in output
    assert not (tmp_path / "exported").exists()


def test_the_files_of_an_export_have_the_mode_of_new_files(exported: Path) -> None:
    (exported / "new").touch()
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1


def test_a_model_without_a_tokenizer_uses_that_of_the_data(
    exported: Path, dataset: Path, tmp_path: Path
) -> None:
    write_exported(tmp_path / "bare", saving.model(2), None)
    bare = json_of("eval", tmp_path / "bare", dataset, "--json", "--mem-len", 0)
    options = ("--json", "--mem-len", 0, "--tgt-len", bare["tgt_len"])
    assert bare["reset"] == "stream"
    assert json_of("eval", exported, dataset, *options)["bytes_scored"] == bare["bytes_scored"]


def test_text_needs_a_tokenizer_which_can_be_copied(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    write_exported(bare, saving.model(2), None)
    code, output = run_txl("generate", bare, *TEXT)
    assert (code, "tokenizer.json" in output) == (4, True)
    (bare / "tokenizer.json").write_text(ByteTokenizer().to_json())
    assert json_of("generate", bare, *TEXT)["text"]


@pytest.mark.parametrize("vocab_size", [256, 258])
def test_data_of_another_vocabulary(dataset: Path, tmp_path: Path, vocab_size: int) -> None:
    config = replace(saving.CONFIG, vocab_size=vocab_size)
    write_exported(tmp_path / "bare", TransformerXL(config), None)
    code, output = run_txl("eval", tmp_path / "bare", dataset)
    assert code == 3
    assert "vocab_size=257" in output
    assert f"vocab_size={vocab_size}" in output


def test_data_of_another_tokenizer(exported: Path, dataset: Path, tmp_path: Path) -> None:
    other = shutil.copytree(dataset, tmp_path / "other")
    manifest = load_manifest(other).model_copy(update={"tokenizer_digest": "f" * 64})
    (other / "manifest.json").write_bytes(manifest.to_bytes())
    code, output = run_txl("eval", exported, other)
    assert code == 3
    assert ByteTokenizer().digest in output
    assert "f" * 64 in output


def test_a_tokenizer_of_another_size_than_its_model(dataset: Path, tmp_path: Path) -> None:
    config = replace(saving.CONFIG, vocab_size=31)
    wrong = tmp_path / "wrong"
    write_exported(wrong, TransformerXL(config), ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"vocab_size=257.*vocab_size=31"):
        find_model(wrong)
    assert run_txl("eval", wrong, dataset)[0] == 4
    assert run_txl("generate", wrong, *TEXT)[0] == 4


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_weights_of_other_programs_have_to_be_imported_first(command: str, dataset: Path) -> None:
    code, output = run_txl(command, OWN_HF, *([dataset] if command == "eval" else TEXT))
    assert code == 4
    assert f"txl import {OWN_HF}" in output


def assert_same(model: TransformerXL, expected: TransformerXL) -> None:
    assert model.config == expected.config
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert all(parameter.requires_grad for parameter in model.parameters())


SOURCES = [
    *hf_directories(),
    *(path for path in golden_files() if original_arguments(path).get("attn_type", 0) == 0),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_import(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, output = run_txl("import", source, "--out", out, "--json")
    assert (code, json.loads(output)["out"]) == (0, str(out))
    loaded, tokenizer = load(out)
    assert_same(loaded, read_model(source).model)
    assert tokenizer is None
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-00000002"])
def test_export_of_a_checkpoint_or_a_run(source: str, tmp_path: Path) -> None:
    for step in (1, 2):
        saving.save(tmp_path / "run", step=step)
    code, output = run_txl("export", tmp_path / source, "--out", tmp_path / "out")
    assert code == 0, output
    loaded, tokenizer = load(tmp_path / "out")
    assert_same(loaded, saving.model(2))
    assert tokenizer is not None
    assert tokenizer.digest == ByteTokenizer().digest


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_missing_source(command: str, tmp_path: Path) -> None:
    code, output = run_txl(command, tmp_path / "nowhere", "--out", tmp_path / "out")
    assert code == 4
    assert "does not exist; give a" in output
    assert not (tmp_path / "out").exists()


def test_import_of_a_run_names_the_right_command(tmp_path: Path) -> None:
    saving.save(tmp_path / "run", step=1)
    code, output = run_txl("import", tmp_path / "run", "--out", tmp_path / "out")
    assert code == 4
    assert f"txl export {tmp_path / 'run'}" in output


def test_exit_codes_of_bad_weights_and_bad_configs(tmp_path: Path) -> None:
    bad_config = hf_copy(tmp_path / "config", config={"n_head": 0})
    assert run_txl("import", bad_config, "--out", tmp_path / "out")[0] == 2
    weights = hf_copy(tmp_path / "weights") / "pytorch_model.bin"
    torch.save(hf_weights() | {"crit.cluster_bias": torch.ones(3)}, weights)
    assert run_txl("import", weights.parent, "--out", tmp_path / "out")[0] == 4
    assert not (tmp_path / "out").exists()


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, output = run_txl("import", OWN_HF, "--out", tmp_path)
    assert code == 2
    assert "not empty" in output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_diverged_model_is_not_written(tmp_path: Path) -> None:
    model = small_model()
    model.layers[1].attention.query.weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers.1.attention.query.weight is NaN or Inf"):
        write_exported(tmp_path / "out", model, None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("position", [0, 100, -1])
def test_one_flipped_bit_of_the_weights_is_detected(position: int, tmp_path: Path) -> None:
    write_exported(tmp_path, small_model(), None)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="sha256"):
        load(tmp_path)


def test_an_edited_config(tmp_path: Path) -> None:
    write_exported(tmp_path, small_model(), None)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    for change, error, match in [
        ({"version": 2}, CheckpointError, "version"),
        ({"model": 3}, CheckpointError, "model"),
        ({"reading": {"tgt_len": 0}}, CheckpointError, "reading"),
        ({"reading": {"reset": "never"}}, CheckpointError, "reading"),
        ({"model": written["model"] | {"ghost": 1}}, ConfigError, "ghost"),
        ({"model": written["model"] | {"n_head": 0}}, ConfigError, "n_head"),
        ({"model": written["model"] | {"softcap": 15.0}}, ConfigError, "softcap"),
        ({"model": written["model"] | {"d_inner": 8}}, CheckpointError, "feed_forward"),
    ]:
        path.write_text(json.dumps(written | change))
        with pytest.raises(error, match=match):
            load(tmp_path)


def test_a_config_of_an_earlier_version_has_settings_that_change_nothing(tmp_path: Path) -> None:
    model = small_model()
    write_exported(tmp_path, model, None)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    removed = {
        name.removeprefix("model."): gone.remaining[0]
        for name, gone in SETTINGS.items()
        if name.startswith("model.") and gone.remaining
    }
    assert removed.keys().isdisjoint(written["model"])
    path.write_text(json.dumps(written | {"model": removed | written["model"]}))
    assert load(tmp_path)[0].config == model.config
