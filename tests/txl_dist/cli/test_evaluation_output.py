"""What `txl eval` prints, and `--per-document`: the sums of each document, against its targets."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.segments import read_range
from data_pipeline.system.workers import InProcess, ProcessWorkers, Workers
from tests.support.exported_model import export_small_model
from tests.support.run_directories import evaluation
from tests.support.tokenizer_families import LIBRARY_OF
from tests.txl_dist.evaluation.test_distributed import Recorder
from txl_dist.cli.evaluation_output import (
    document_lines,
    print_results,
    record_results,
    with_differences,
)
from txl_dist.convert.stored_model import find_model
from txl_dist.evaluation.distributed import evaluate_on_workers, plan_spec
from txl_dist.evaluation.result import EvaluationResult
from txl_dist.evaluation.scores import SCORES, NamedSums, score
from txl_dist.evaluation.spec import EvaluationSpec, evaluation_spec


def test_an_interval_that_is_not_known_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    content = evaluation("m", mem_len=4, nats=2.5, details=True)
    for interval in (None, {"nats_per_token": None}):
        content["details"]["interval"] = interval
        print_results([EvaluationResult.model_validate(content)])
        assert "95 % interval    none, too few documents" in capsys.readouterr().out


TEXTS = ["z", "a long document, longer than a chunk. " * 40, "x", "y\n", *map(str, range(40)), "é"]


@pytest.fixture(scope="module", params=["byte", "word", "wt103"])
def spec(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EvaluationSpec:
    """Documents of one token (recipe wt103: the first one) to several chunks, in two shards."""
    folder = tmp_path_factory.mktemp("documents")
    lines = [json.dumps({"id": f"ü{number}", "text": text}) for number, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(lines[:20]))
    (folder / "b.jsonl").write_text("\n".join(lines[20:]))
    kind = {"tokenizer": request.param}
    if request.param == "wt103":
        kind = {"tokenizer": "word", "recipe": "wt103"}
    settings = PrepareSettings(**kind, block_bytes=512, shard_bytes=700)
    prepare_dataset([folder], folder / "data", settings)
    model = export_small_model(folder / "model", folder / "data")
    return evaluation_spec(model, folder / "data", split="train", tgt_len=5, batch=2)


def evaluate(
    spec: EvaluationSpec, workers: Workers, scores: Path | None = None, **options: Any
) -> tuple[EvaluationResult, list[bytes]]:
    planned = [plan_spec(spec, scores, per_document=True, **options)]
    results = evaluate_on_workers(planned, workers)
    return results[0], list(document_lines(planned))


def expected_scores(spec: EvaluationSpec) -> list[dict[str, Any]]:
    """By the definition: one sequential pass, and a loop over the targets."""
    stored = find_model(spec.checkpoint)
    model, tokenizer = stored.load_with_tokenizer()
    source = open_split(spec.data, "train")
    tokens, age = read_range(source, 0, source.num_tokens)
    ids = torch.from_numpy(tokens.astype("int64"))[None]
    memory, nats = model.empty_memory(1), []
    with torch.no_grad():
        for first in range(0, source.num_tokens - 1, 5):
            stop = min(first + 5, source.num_tokens - 1)
            age_BT = torch.from_numpy(age[None, first:stop])
            segment = ids[:, first:stop], ids[:, first + 1 : stop + 1]
            nats_BT, memory = model(*segment, age_BT, memory)
            nats += nats_BT[0].double().tolist()
    documents: list[dict[str, Any]] = []
    names = [document.id for document in source.documents()]
    num_bytes = tokenizer.token_bytes()
    for position, token in enumerate(tokens.tolist()):
        if age[position] == 0:
            documents.append({"id": names[len(documents)], "tokens": 0, "bytes": 0, "nats": 0.0})
        if position:
            documents[-1]["tokens"] += 1
            documents[-1]["bytes"] += int(num_bytes[token])
            documents[-1]["nats"] += nats[position - 1]
    return documents


def test_every_document_has_the_sums_of_its_targets(spec: EvaluationSpec) -> None:
    result, lines = evaluate(spec, InProcess())
    documents = [json.loads(line) for line in lines]
    expected = expected_scores(spec)
    assert len(expected) == len(TEXTS)
    is_word_model = not result.protocol.endswith("not detokenized")
    assert documents == [
        {
            **document,
            "checkpoint": str(spec.checkpoint),
            "split": "train",
            "nats": pytest.approx(document["nats"], rel=1e-5, abs=1e-5),
            "bytes": None if is_word_model else document["bytes"],
        }
        for document in expected
    ]
    assert sum(each["tokens"] for each in documents) == result.sums.num_tokens
    assert sum(each["nats"] for each in documents) == pytest.approx(result.sums.nats, rel=1e-12)
    if not is_word_model:
        assert sum(each["bytes"] for each in documents) == result.sums.num_bytes


@pytest.mark.parametrize(
    "spec",
    ["byte", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("word", "wt103"))],
    indirect=True,
)
def test_neither_workers_nor_a_stop_nor_details_change_a_bit(
    spec: EvaluationSpec, tmp_path: Path
) -> None:
    expected = evaluate(spec, InProcess())
    assert evaluate(spec, Recorder()) == expected, "the last batch first"
    assert evaluate(spec, InProcess(), details=True)[1] == expected[1]
    with ProcessWorkers(2) as workers:
        assert evaluate(spec, workers) == expected
    with pytest.raises(KeyboardInterrupt):
        evaluate(spec, Recorder(stop_after=2), tmp_path)
    again = Recorder()
    assert evaluate(spec, again, tmp_path, resume=True) == expected
    plain, wanted = (plan_spec(spec, tmp_path, per_document=each) for each in (False, True))
    assert plain.finished.path != wanted.finished.path, "sums without documents are not used"
    num_batches = sum(1 for _ in plan_spec(spec).batches())
    assert len(again.scored) == num_batches - 2
    (_, lines), (_, others) = expected, evaluate(replace(spec, batch_chunks=7), InProcess())
    for line, other in zip(map(json.loads, lines), map(json.loads, others), strict=True):
        assert other == line | {"nats": pytest.approx(line["nats"], rel=1e-5)}


def test_a_part_of_a_split_has_the_documents_that_begin_in_it(spec: EvaluationSpec) -> None:
    part = replace(spec, settings=replace(spec.settings, max_tokens=30))
    result, lines = evaluate(part, InProcess())
    documents = [json.loads(line) for line in lines]
    assert sum(each["tokens"] for each in documents) == result.sums.num_tokens == 29
    (_, whole) = evaluate(spec, InProcess())
    assert [d["id"] for d in documents] == [json.loads(w)["id"] for w in whole[: len(documents)]]


PLAIN = ["größer à Łódź, dit-elle", "潮は満ちる。灰色", "grey"]
"""Texts that a tokenizer of pieces in spaces keeps; lines 0 and 1 are European and Japanese."""
TO_NORMALIZE = [" e\u0301 ½  x", "灰 ▁ 漢"]
"""Texts that no tokenizer keeps but a byte-level one without normalizer."""


@pytest.mark.parametrize("family", [*LIBRARY_OF, "char", "word"])
@pytest.mark.parametrize("texts", [PLAIN, PLAIN + TO_NORMALIZE], ids=["plain", "normalized"])
def test_bytes_of_any_tokenizer_are_those_of_the_text_or_null(
    family: str, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    own, path = family not in LIBRARY_OF, tmp_path / "library.json"
    if not own:
        LIBRARY_OF[family]().save(str(path))
    prepare_dataset(
        [tmp_path / "a.jsonl"],
        tmp_path / "data",
        PrepareSettings(tokenizer=family if own else "file"),
        tokenizer_file=None if own else path,
    )
    model = export_small_model(tmp_path / "model", tmp_path / "data")
    spec = evaluation_spec(model, tmp_path / "data", split="train", tgt_len=7, batch=2)

    planned = [plan_spec(spec, per_document=True)]
    (result,) = evaluate_on_workers(planned, InProcess())
    tokenizer = find_model(model).load_with_tokenizer()[1]
    unknown = sum(tokenizer.unknown_symbols(text).total() for text in texts)
    assert result.unknown_targets == unknown
    assert bool(unknown) == (family in ("t5", "bert"))
    sizes = [len(text.encode()) for text in texts]
    bits = result.sums.nats / (sum(sizes) * math.log(2))
    assert result.scores["bits_per_byte"] == (None if unknown else pytest.approx(bits))
    assert result.bytes_scored == (None if unknown else sum(sizes))
    documents = [json.loads(line)["bytes"] for line in document_lines(planned)]
    tokens_tell_bytes = family in ("gpt2", "llama3", "char")
    assert documents == (sizes if tokens_tell_bytes else [None] * len(texts))

    part = replace(spec, settings=replace(spec.settings, max_tokens=6))
    planned = [plan_spec(part, per_document=True)]
    (result,) = evaluate_on_workers(planned, InProcess())
    (content,) = record_results(planned, [result], 1)
    print_results([content])
    printed = capsys.readouterr().out
    if tokens_tell_bytes:
        read, _ = read_range(open_split(spec.data, "train"), 0, 6)
        assert content.bytes_scored == len(tokenizer.decode_bytes(read))
        assert "only the first" not in printed.split("protocol")[0]
    else:
        assert (content.scores["bits_per_byte"], content.bytes_scored) == (None, None)
        assert "only the first 6 tokens" in (content.not_counted or "")
        assert "bytes            not known: only the first 6 tokens" in printed
        assert "bits per byte" not in printed
        assert {json.loads(line)["bytes"] for line in document_lines(planned)} == {None}


def test_a_text_with_an_unknown_character_has_no_bytes_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["aab", "ab漢", "ba"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = PrepareSettings(tokenizer="char", vocab_size=4)
    prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "data", settings)
    model = export_small_model(tmp_path / "model", tmp_path / "data")
    spec = evaluation_spec(model, tmp_path / "data", split="train", tgt_len=3, batch=2)
    result, lines = evaluate(spec, InProcess())
    assert [json.loads(line)["bytes"] for line in lines] == [3, None, 2]
    assert (result.scores["bits_per_byte"], result.bytes_scored) == (None, None)
    assert result.to_json()["unknown_targets"] == 1
    assert "10 tokens scored, 1 unknown target (10.00%), mode" in result.protocol
    print_results([result])
    lines_printed = capsys.readouterr().out.splitlines()
    assert "  unknown targets  1 (10.00%)" in lines_printed
    assert "  bytes            not known: unknown targets do not tell their text" in lines_printed
    print_results([result, result])
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert "unknown" in header
    assert "10.00%" in row
    part = replace(spec, settings=replace(spec.settings, max_tokens=9))
    assert evaluate(part, InProcess())[0].scores["bits_per_byte"] is None
    first = replace(spec, settings=replace(spec.settings, max_tokens=6))
    assert evaluate(first, InProcess())[0].sums.num_bytes == 3 + 1


@pytest.mark.parametrize("spec", ["byte"], indirect=True)
def test_a_new_score_is_one_function(
    spec: EvaluationSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SCORES, "nats_per_kilobyte", None)  # removed after the test

    @score(needs="bytes")
    def nats_per_kilobyte(sums: NamedSums) -> float:
        return 1000 * sums["nats"] / sums["bytes"]

    planned = [plan_spec(spec, details=True)]
    results = evaluate_on_workers(planned, InProcess())
    (content,) = record_results(planned, results, 1)
    expected = 1000 * math.log(2) * content.known_scores["bits_per_byte"]
    assert content.to_json()["nats_per_kilobyte"] == pytest.approx(expected)
    assert content.details
    low, high = content.details["interval"]["nats_per_kilobyte"]
    assert low < expected < high
    print_results([content])
    printed = capsys.readouterr().out
    assert f"nats per kilobyte  {expected:.4f}" in printed
    print_results([content, content])
    header, *rows = capsys.readouterr().out.splitlines()
    assert "nats per kilobyte" in header
    assert f"{expected:.4f}" in rows[0]


@pytest.mark.parametrize("spec", ["byte"], indirect=True)
@pytest.mark.parametrize(("kind", "is_unbounded"), [("recurrent", False), ("tokens", True)])
def test_a_memory_without_limit_is_in_the_protocol_and_has_no_number_of_context_tokens(
    spec: EvaluationSpec, kind: str, is_unbounded: bool, tmp_path: Path
) -> None:
    exported = export_small_model(tmp_path / "model", Path(str(spec.data)), memory=kind)
    planned = [plan_spec(evaluation_spec(exported, spec.data, split="train"))]
    (content,) = record_results(planned, evaluate_on_workers(planned, InProcess()), 1)
    assert ("memory tokens, mem_len" in content.protocol) == is_unbounded
    assert (content.context_tokens is None) == is_unbounded


@pytest.mark.parametrize("spec", ["byte"], indirect=True)
def test_details_of_several_models_have_the_difference_to_the_first_one(
    spec: EvaluationSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(spec, settings=replace(spec.settings, mem_len=0))
    planned = [plan_spec(each, details=True) for each in (spec, other)]
    results = evaluate_on_workers(planned, InProcess())
    first, second = with_differences(record_results(planned, results, 1), planned)
    assert "difference" not in first.to_json()["details"]
    difference = second.to_json()["details"]["difference"]
    assert difference["to"] == first.checkpoint
    expected = (second.nats - first.nats) / first.tokens_scored
    assert difference["nats_per_token"] == pytest.approx(expected, abs=1e-9)
    low, high = difference["interval"]
    assert low < expected < high
    print_results([first, second])
    printed = capsys.readouterr().out
    assert f"{expected:+.4f} nats per token; 95 % interval {low:+.4f} to {high:+.4f}" in printed
