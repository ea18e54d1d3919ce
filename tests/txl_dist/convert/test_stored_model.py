"""`txl eval` and `txl generate` read a model in either format, and only data of its tokenizer."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer
from tests.support.commands import run_txl
from tests.support.replayed_models import OWN_HF
from tests.txl_dist.checkpoint import saving
from txl_dist.convert.single_file import Reading, describe_exported, write_exported
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError
from txl_dist.model.transformer_xl import TransformerXL

TEXT = ("--prompt", "def ", "--max-tokens", 9, "--temperature", 2, "--json")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two documents in `train`, two in `valid`; each a few segments long."""
    (tmp_path / "corpus").mkdir()
    for number in range(4):
        text = f"{number}: the tide comes in, the tide goes out. " * (number + 1)
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    settings = PrepareSettings(split={"valid": 0.5})
    prepare_dataset([tmp_path / "corpus"], tmp_path / "data", settings)
    return tmp_path / "data"


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


def test_an_export_writes_as_its_checkpoint(run: Path, exported: Path) -> None:
    assert json_of("generate", exported, *TEXT) == json_of("generate", run, *TEXT)


def test_an_export_imported_again_reads_text_as_before(exported: Path, tmp_path: Path) -> None:
    assert run_txl("import", exported, "--out", tmp_path / "again")[0] == 0
    before, after = describe_exported(exported), describe_exported(tmp_path / "again")
    assert after.reading == before.reading == Reading(tgt_len=4, reset="document")
    assert (after.config, after.weights_sha256) == (before.config, before.weights_sha256)


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
