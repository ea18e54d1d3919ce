"""Specs that cannot be scored are refused by name.

Weights that are not finite: `tests/txl_dist/cli/test_evaluate.py`, which has a checkpoint.
"""

from pathlib import Path

import pytest
import torch

from data_pipeline.shards.manifest import load_manifest, open_tokenizer
from data_pipeline.system.workers import InProcess
from tests.support.exported_model import export_small_model
from tests.support.small_models import small_model
from txl_dist.convert.stored_model import Reading, write_exported
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_spec
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.scoring import Scorer
from txl_dist.evaluation.spec import evaluation_spec


@pytest.fixture(scope="module")
def model(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small_model(tmp_path_factory.mktemp("model") / "small", dataset)


def test_the_settings_are_those_of_training_unless_given(model: Path, dataset: Path) -> None:
    settings = evaluation_spec(model, dataset).settings
    assert (settings.split, settings.mode) == ("valid", "exact")
    assert (settings.tgt_len, settings.mem_len, settings.reset) == (12, 8, "document")
    settings = evaluation_spec(model, dataset, tgt_len=5, mem_len=0, clamp_len=4).settings
    assert (settings.tgt_len, settings.mem_len, settings.clamp_len) == (5, 0, 4)
    assert evaluation_spec(model, dataset, clamp_len=0).settings.clamp_len is None


@pytest.mark.parametrize(
    ("trained", "options", "message"),
    [
        ({"distance_encoding": "absolute", "mem_len": 0}, {"mem_len": 3}, "mem_len=3"),
        ({"distance_encoding": "rotary"}, {"clamp_len": 3}, "clamp_len=3"),
        ({"distance_encoding": "shaw", "clamp_len": 9}, {"clamp_len": 3}, "clamp_len=3"),
        ({}, {"same_length": True, "mem_len": 0}, "same_length=true"),
        ({"memory": "tokens"}, {"mem_len": 3}, "mem_len=3 has no effect"),
        ({"memory": "tokens"}, {"mode": "fast"}, "mode=fast would be exact"),
        ({"memory": "recurrent+tokens"}, {"mode": "fast"}, "mode=fast would be exact"),
    ],
)
def test_memory_options_that_a_model_does_not_support_are_refused(
    dataset: Path,
    tmp_path: Path,
    trained: dict[str, object],
    options: dict[str, object],
    message: str,
) -> None:
    model = export_small_model(tmp_path / "model", dataset, **trained)
    with pytest.raises(ConfigError, match=message):
        evaluation_spec(model, dataset, **options)  # type: ignore[arg-type]


def test_a_missing_split_and_one_shorter_than_a_segment_are_refused(
    model: Path, dataset: Path
) -> None:
    num_targets = load_manifest(dataset).splits["valid"].tokens - 1
    plan_spec(evaluation_spec(model, dataset, tgt_len=num_targets))
    with pytest.raises(DataError, match=rf"split valid .*--tgt-len {num_targets} or less"):
        plan_spec(evaluation_spec(model, dataset, tgt_len=num_targets + 1))
    with pytest.raises(DataError, match="it has train, valid"):
        plan_spec(evaluation_spec(model, dataset, split="test"))


def test_a_score_that_is_not_finite_is_refused_with_its_chunk(
    model: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights whose products overflow."""
    overflowing = small_model(vocab_size=load_manifest(dataset).vocab_size)
    with torch.no_grad():
        for weight in overflowing.parameters():
            weight.mul_(1e30)
    reading = Reading(tgt_len=12, reset="document")
    write_exported(tmp_path / "model", overflowing.float(), open_tokenizer(dataset), reading)
    spec = evaluation_spec(tmp_path / "model", dataset, max_tokens=100)
    with pytest.raises(CheckpointError, match=r"chunk 0 of split valid, .*model: the sum of its"):
        evaluate_on_workers([plan_spec(spec)], InProcess())
    sums = [LossSums(1.0, 1), LossSums(float("nan"), 1)]
    monkeypatch.setattr(Scorer, "scores", lambda self, chunks, counter: sums)
    with pytest.raises(CheckpointError, match="chunk 1 of"):
        evaluate_on_workers([plan_spec(evaluation_spec(model, dataset, batch=2))], InProcess())
