"""Evaluation on workers: what a stopped evaluation has finished is used, and nothing else is.

Killed workers and killed commands: `tests/faults/test_evaluation_kills.py`.

A sweep: the setting with the lowest loss on the first split is reported on the others.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.shards.manifest import ShardManifest, load_manifest, open_tokenizer
from data_pipeline.system.workers import InProcess, Progress
from tests.support.exported_model import export_small_model
from txl_dist.convert.stored_model import Reading, write_exported
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.evaluation import distributed
from txl_dist.evaluation.batches import BatchScores
from txl_dist.evaluation.distributed import (
    PlannedEvaluation,
    Sweep,
    evaluate_on_workers,
    evaluate_sweep,
    plan_spec,
)
from txl_dist.evaluation.result import EvaluationResult
from txl_dist.evaluation.scores import LossSums
from txl_dist.evaluation.spec import (
    EvaluationSettings,
    EvaluationSpec,
    combinations,
    evaluation_spec,
    parse_sweep,
    plan_evaluation,
)
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import torch_threads

SETTINGS = EvaluationSettings(
    split="valid", mode="exact", tgt_len=12, mem_len=8, clamp_len=None, same_length=False,
    reset="document", max_tokens=240,
)  # fmt: skip

NUM_BATCHES = 5


@pytest.fixture(scope="module")
def spec(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationSpec:
    model = export_small_model(tmp_path_factory.mktemp("model") / "small", dataset)
    return EvaluationSpec(checkpoint=model, data=dataset, settings=SETTINGS, batch_chunks=1)


@pytest.fixture(scope="module")
def expected(spec: EvaluationSpec) -> EvaluationResult:
    return evaluate_alone(spec)


def evaluate_alone(spec: EvaluationSpec) -> EvaluationResult:
    """Without batches and workers."""
    scorer = spec.open()
    chunks = plan_evaluation(scorer.source, spec.settings, scorer.model.config)
    (result,) = evaluate_on_workers([plan_spec(spec)], InProcess())
    assert result.nats == sum(scorer.scores(chunks), LossSums()).nats
    return result


class Recorder(InProcess):
    """Workers that score the last unit first, note every unit, and stop after some."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.stop_after = stop_after
        self.scored: list[str] = []

    def map(
        self, function: Callable[[Any], Any], units: Iterable[Any]
    ) -> Iterator[tuple[int, Any]]:
        for number, unit in reversed(list(enumerate(units))):
            if len(self.scored) == self.stop_after:
                raise KeyboardInterrupt
            self.scored.append(str(unit))
            yield number, function(unit)


def evaluate(
    specs: Iterable[EvaluationSpec],
    workers: InProcess,
    *,
    scores: Path | None = None,
    resume: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> list[EvaluationResult]:
    planned = [plan_spec(spec, scores, resume=resume) for spec in specs]
    return evaluate_on_workers(planned, workers, progress=progress)


def test_a_model_that_was_replaced_since_the_plan_is_refused(
    spec: EvaluationSpec, dataset: Path, tmp_path: Path
) -> None:
    """As after a rollback, when the run saves the same step again."""
    model = export_small_model(tmp_path / "model", dataset)
    planned = plan_spec(replace(spec, checkpoint=model), tmp_path / "scores")
    shutil.rmtree(model)
    export_small_model(model, dataset, seed=1)
    with pytest.raises(CheckpointError, match="another model than when this evaluation was plan"):
        evaluate_on_workers([planned], InProcess())
    shutil.rmtree(model)
    export_small_model(model, dataset)
    assert evaluate_on_workers([planned], InProcess())


def resume(*specs: EvaluationSpec, scores: Path) -> tuple[list[EvaluationResult], int]:
    """The results and the number of batches that were scored for them."""
    workers = Recorder()
    results = evaluate(specs, workers, scores=scores, resume=True)
    return results, len(workers.scored)


def stop_after(num_batches: int, *specs: EvaluationSpec, scores: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(specs, Recorder(num_batches), scores=scores)


def test_the_threads_of_the_caller_do_not_change_a_bit(dataset: Path, tmp_path: Path) -> None:
    """Wide matrices: a product of two threads adds up in another order than one of one thread."""
    vocab_size = load_manifest(dataset).vocab_size
    config = ModelConfig(
        vocab_size=vocab_size, n_layer=1, d_model=256, n_head=4, d_head=64, d_inner=2048, mem_len=8
    )
    model = TransformerXL(config)
    tokenizer = open_tokenizer(dataset, load_manifest(dataset))
    write_exported(tmp_path / "wide", model, tokenizer, Reading(tgt_len=12, reset="document"))
    spec = EvaluationSpec(
        checkpoint=tmp_path / "wide", data=dataset, settings=SETTINGS, batch_chunks=3
    )
    nats = []
    for num_threads in (1, 2):
        with torch_threads(num_threads):
            nats.append(evaluate([spec], InProcess())[0].sums.nats)
            assert torch.get_num_threads() == num_threads
    assert nats[0] == nats[1]


def test_the_sums_are_added_in_the_order_of_the_chunks(spec: EvaluationSpec) -> None:
    planned = plan_spec(spec)
    for number, nats in ((2, 1.0), (0, 1e16), (1, -1e16)):  # finished in this order
        planned.finished.add(number, BatchScores([LossSums(nats, 1, 1)]))
    assert planned.sums.nats == 1.0  # in the order of completion: 0.0


def test_a_stopped_evaluation_goes_on_from_its_finished_batches(
    spec: EvaluationSpec, expected: EvaluationResult, tmp_path: Path
) -> None:
    stop_after(NUM_BATCHES - 1, spec, scores=tmp_path)
    assert resume(spec, scores=tmp_path) == ([expected], 1)
    assert resume(spec, scores=tmp_path) == ([expected], 0)
    workers = Recorder()
    assert evaluate([spec], workers, scores=tmp_path) == [expected]
    assert len(workers.scored) == NUM_BATCHES, "without resume nothing is used"


def test_several_specs_resume_in_the_spec_that_was_stopped(
    spec: EvaluationSpec, expected: EvaluationResult, tmp_path: Path
) -> None:
    train = replace(spec, settings=replace(spec.settings, split="train"))
    stop_after(NUM_BATCHES + 2, spec, train, scores=tmp_path)
    (first, second), num_batches = resume(spec, train, scores=tmp_path)
    assert first == expected
    assert second == evaluate_alone(train)
    assert num_batches == NUM_BATCHES - 2
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


@pytest.mark.parametrize("change", ["settings", "batch", "weights", "data", "code", "nothing"])
def test_sums_of_another_evaluation_are_not_used(
    spec: EvaluationSpec,
    dataset: Path,
    tmp_path: Path,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = plan_spec(spec, tmp_path).finished.path
    assert plan_spec(spec, tmp_path).finished.path == before
    if change == "settings":
        spec = replace(spec, settings=replace(spec.settings, clamp_len=4))
    elif change == "batch":
        spec = replace(spec, batch_chunks=4)
    elif change == "weights":
        spec = replace(spec, checkpoint=export_small_model(tmp_path / "other", dataset, seed=1))
    elif change == "data":
        monkeypatch.setattr(ShardManifest, "digest", "0" * 64)
    elif change == "code":
        monkeypatch.setattr(distributed, "code_description", lambda: "another version")
    else:  # a model that was moved is the same one
        shutil.copytree(spec.checkpoint, tmp_path / "copy")
        spec = replace(spec, checkpoint=tmp_path / "copy")
    assert (plan_spec(spec, tmp_path).finished.path == before) == (change == "nothing")


@pytest.mark.fault_row(49)
def test_damaged_lines_are_named_and_their_batches_scored_again(
    spec: EvaluationSpec,
    expected: EvaluationResult,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = replace(spec, settings=replace(spec.settings, clamp_len=4))
    evaluate([spec], Recorder(), scores=tmp_path)
    evaluate([other], Recorder(), scores=tmp_path / "other")
    (path,), (other_path,) = (place.glob("*.jsonl") for place in (tmp_path, tmp_path / "other"))
    lines = path.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[1])
    entry["scores"]["sums"][0][0] += 1.0
    lines[1] = json.dumps(entry).encode() + b"\n"
    lines[2] = bytes(len(lines[2]) - 1) + b"\n"
    lines[3] = other_path.read_bytes().splitlines(keepends=True)[3]
    lines[-1] = lines[-1][:-1]  # cut by a kill, which is not damage
    path.write_bytes(b"".join(lines))
    with caplog.at_level(logging.WARNING):
        assert resume(spec, scores=tmp_path) == ([expected], 4)
    assert f"{path} is damaged or of another evaluation in 3 lines (the first is line 2)" in (
        caplog.text
    )
    caplog.clear()
    assert resume(spec, scores=tmp_path) == ([expected], 0)
    assert not caplog.text, "the file was repaired"


def test_a_directory_that_cannot_be_written_is_only_a_warning(
    spec: EvaluationSpec,
    expected: EvaluationResult,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert resume(spec, scores=tmp_path / "file") == ([expected], NUM_BATCHES)
    assert "--out DIR" in caplog.text


def test_resume_without_a_place_for_scores_is_refused(spec: EvaluationSpec) -> None:
    with pytest.raises(ConfigError, match="--out DIR"):
        evaluate([spec], InProcess(), resume=True)


def test_progress_counts_every_token_that_is_read_once(
    spec: EvaluationSpec, tmp_path: Path
) -> None:
    calls: list[tuple[str, int, int]] = []
    (result,) = evaluate([spec], InProcess(), progress=lambda *call: calls.append(call))
    num_read = round(result.sums.num_tokens * (1 + result.context_overhead))
    assert calls[0] == ("scoring", 0, num_read)
    assert calls[-1] == ("scoring", num_read, num_read)
    assert len(calls) == 1 + NUM_BATCHES


def test_the_combinations_are_the_cross_product() -> None:
    values = parse_sweep(["mem_len=0,128 clamp_len=0,400", "tgt_len=64"])
    assert combinations(values) == [
        {"mem_len": 0, "clamp_len": 0, "tgt_len": 64},
        {"mem_len": 0, "clamp_len": 400, "tgt_len": 64},
        {"mem_len": 128, "clamp_len": 0, "tgt_len": 64},
        {"mem_len": 128, "clamp_len": 400, "tgt_len": 64},
    ]
    assert combinations({}) == [{}]


@pytest.mark.parametrize(
    "text",
    ["mem_len", "mem_len=", "mem_len=1,,2", "mem_len=-1", "mem_len=1.5", "mem_len=1,1",
     "tgt_len=0", "batch=1", "mem_len=1 mem_len=2"],
)  # fmt: skip
def test_a_wrong_assignment_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sweep([text])
    assert text.rsplit(maxsplit=1)[-1] in str(error.value)


@pytest.fixture(scope="module")
def planned(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sweep]:
    """Two models, three settings, two splits."""
    sweeps = []
    for seed in range(2):
        path = tmp_path_factory.mktemp("model") / f"seed{seed}"
        model = export_small_model(path, dataset, seed=seed)
        settings = combinations({"mem_len": [0, 8], "tgt_len": [50, 100]})
        sweeps.append(
            [
                [plan(model, dataset, split=split, **setting) for split in ("valid", "train")]
                for setting in settings
            ]
        )
    return sweeps


def plan(model: Path, data: Path, *, split: str, **options: int) -> PlannedEvaluation:
    return plan_spec(evaluation_spec(model, data, split=split, max_tokens=401, **options))


def sweep_on(workers: InProcess, sweep: Sweep) -> list[EvaluationResult]:
    return evaluate_sweep(sweep, lambda planned: evaluate_on_workers(planned, workers))


def test_the_lowest_loss_on_the_first_split_is_reported_on_the_others(
    planned: list[Sweep],
) -> None:
    for model in planned:
        workers = Recorder()
        *candidates, reported = sweep_on(workers, model)
        losses = [candidate.nats for candidate in candidates]
        assert len(set(losses)) == 4
        best = losses.index(min(losses))
        assert [each.selected for each in candidates] == [n == best for n in range(4)]
        settings = [specs[0].spec.settings for specs in model]
        lengths = [(each.tgt_len, each.mem_len) for each in candidates]
        assert lengths == [(each.tgt_len, each.mem_len) for each in settings]
        (expected,) = evaluate_on_workers(model[best][1:], InProcess())
        assert reported == expected.model_copy(update={"selected": True})
        num_train = sum("split train" in unit for unit in workers.scored)
        assert num_train == len([*model[best][1].batches()]), "only the best one"


def test_equal_losses_select_the_first_setting(planned: list[Sweep]) -> None:
    specs = planned[0][0]
    results = sweep_on(InProcess(), [specs[:1], specs[:1]])
    assert [each.selected for each in results] == [True, False]
