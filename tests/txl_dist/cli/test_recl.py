"""`txl recl`: a table, recl.json and two plots; groups that do not fit are refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_pipeline.shards.manifest import load_manifest
from tests.support.commands import run_txl
from tests.support.exported_model import export_small_model, tide_dataset
from txl_dist.cli import options
from txl_dist.cli.app import app

WRITTEN = ["recl.json", "recl.png", "recl.svg"]
SMALL = ("--positions", 30, "--max-context", 24, "--delta", 8)


@pytest.fixture(scope="module")
def group(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model with memory, and one with absolute positions and segments of 12 tokens."""
    folder = tmp_path_factory.mktemp("group")
    vanilla = {"mem_len": 0, "distance_encoding": "absolute"}
    return [
        export_small_model(folder / "memory", dataset),
        export_small_model(folder / "vanilla", dataset, **vanilla),
    ]


def test_it_writes_the_curve_and_recl_and_says_how(
    group: list[Path], dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "recl"
    code, output = run_txl("recl", *group, dataset, *SMALL, "--names", "xl,vanilla", "--out", out)
    assert code == 0, output
    assert "group 'xl, vanilla'" in output
    assert "threshold 0.01" in output
    assert sorted(path.name for path in out.iterdir()) == WRITTEN
    content = json.loads((out / "recl.json").read_text())
    assert (content["contexts"], content["delta"]) == ([8, 16, 24], 8)
    assert (content["positions"], content["within_documents"]) == (30, True)
    memory, vanilla = content["models"]
    assert content["data_sha256"] == load_manifest(dataset).digest
    for subject, digest in ((dataset, content["data_sha256"]), ("xl", memory["digest"])):
        assert f"{subject} (sha256 {digest[:12]})" in content["protocol"]
    assert [model["name"] for model in content["models"]] == ["xl", "vanilla"]
    again = json.loads(run_txl("recl", *group, dataset, *SMALL, "--json")[1])["models"]
    assert [each["curve"] for each in again] == [each["curve"] for each in content["models"]]
    # 2 layers with memory 8 and segments of 12 reach two segments back; vanilla none.
    assert (memory["max_context"], vanilla["max_context"]) == (36, 12)
    assert [result["r"] for result in memory["recl"]] == [0.1, 0.5, 1.0]
    assert all(result["recl"] <= 12 for result in vanilla["recl"])
    assert vanilla["curve"][1]["nats"] == vanilla["curve"][2]["nats"]
    for point in [*memory["curve"], *vanilla["curve"]]:
        assert point["low"] <= point["nats"] <= point["high"]


def test_kinds_of_memory_are_one_group(dataset: Path, tmp_path: Path) -> None:
    kinds = ["tokens", "compressive", "recurrent+tokens"]
    models = [export_small_model(tmp_path / kind, dataset, memory=kind) for kind in kinds]
    code, output = run_txl("recl", *models, dataset, *SMALL, "--out", tmp_path / "out")
    assert code == 0, output
    for model in json.loads((tmp_path / "out" / "recl.json").read_text())["models"]:
        nats = [point["nats"] for point in model["curve"]]
        assert nats[0] != nats[2], "24 tokens are two segments"


def test_the_targets_to_score_and_the_time_left_are_shown(
    group: list[Path], dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "SILENT_SECONDS", 0.001)
    result = CliRunner().invoke(app, [str(word) for word in ("recl", *group, dataset, *SMALL)])
    assert result.exit_code == 0, result.output
    amounts = [line for line in result.stderr.splitlines() if line.startswith("scoring: ")]
    assert f" of {2 * 30} targets" in amounts[0]
    assert "s left" in amounts[-1]


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("--max-context", 10, "--delta", 8), 2, "smaller --delta"),
        (("--names", "a,b"), 2, "1 models need as many different names, got a, b"),
        (("--max-context", 10**6, "--delta", 10**5), 3, "the longest document holds"),
        (("--split", "test"), 3, "test"),
    ],
)
def test_invalid_options_are_refused(
    group: list[Path], dataset: Path, words: tuple[object, ...], exit_code: int, message: str
) -> None:
    code, output = run_txl("recl", group[0], dataset, *words)
    assert (code, message in output) == (exit_code, True), output


def test_contexts_that_a_model_cannot_use_measure_nothing(group: list[Path], dataset: Path) -> None:
    _, vanilla = group  # 12 tokens
    code, output = run_txl("recl", vanilla, dataset, "--max-context", 48, "--delta", 12)
    assert code == 2
    assert "uses at most 12 tokens of context, and the first context is 12" in output
    assert output.endswith("Give --max-context 12 --delta 3")
    code, output = run_txl("recl", vanilla, dataset, *output.split()[-4:], "--positions", 9)
    assert code == 0, output


def test_one_name_for_two_models_is_refused(group: list[Path], dataset: Path) -> None:
    code, output = run_txl("recl", group[0], group[0], dataset, *SMALL)
    assert (code, "different names" in output) == (2, True)


def test_models_with_other_tokenizers_are_refused_by_name(
    group: list[Path], dataset: Path, tmp_path: Path
) -> None:
    other = export_small_model(tmp_path / "other", tide_dataset(tmp_path, tokenizer="char"))
    code, output = run_txl("recl", group[0], other, dataset, *SMALL)
    assert code == 3
    for text in (str(other), str(group[0]), "a group needs one tokenizer"):
        assert text in output
