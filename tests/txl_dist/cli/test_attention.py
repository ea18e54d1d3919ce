"""`txl attention`: a table, a JSON file and two plots. An error leaves no file."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.support.commands import run_txl
from tests.support.exported_model import tide_dataset
from tests.txl_dist.checkpoint import saving
from txl_dist.convert.stored_model import Reading, write_exported
from txl_dist.model.transformer_xl import TransformerXL

WRITTEN = ["attention.json", "attention.png", "attention.svg"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tide_dataset(tmp_path_factory.mktemp("attention"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("attention") / "run"
    saving.save(run, step=2)
    return run


@pytest.fixture(scope="module")
def written(run: Path, dataset: Path) -> Path:
    out = run / "attention"
    code, output = run_txl("attention", run, dataset, "--out", out, "--max-tokens", 40)
    assert code == 0, output
    assert "39 queries, segment 4, memory 5" in output
    return out


def test_it_writes_data_and_plots_and_says_where(written: Path, run: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == WRITTEN
    content = json.loads((written / "attention.json").read_text())
    assert (content["num_queries"], content["distances"]) == (39, list(range(9)))
    assert content["model"] == json.loads(json.dumps(asdict(saving.CONFIG)))
    assert (content["settings"]["max_tokens"], content["settings"]["tgt_len"]) == (40, 4)
    assert Path(content["checkpoint"]).parent == run / "checkpoints"
    for part, num_layers, num_heads in (("heads", 2, 3), ("even", 1, 1)):
        by_distance = torch.tensor(content[part]["by_distance"])
        assert by_distance.shape == (num_layers, num_heads, 9)
        torch.testing.assert_close(by_distance.sum(-1), torch.ones(num_layers, num_heads))
        places = torch.tensor([content[part]["memory"], content[part]["segment"]])
        torch.testing.assert_close(places.sum(0), torch.ones(num_layers, num_heads))
        mean_distance = torch.tensor(content[part]["mean_distance"])
        torch.testing.assert_close(mean_distance, by_distance @ torch.arange(9.0))


def test_json_is_the_file(written: Path, run: Path, dataset: Path) -> None:
    code, output = run_txl("attention", run, dataset, "--json", "--max-tokens", 40)
    assert code == 0
    assert json.loads(output) == json.loads((written / "attention.json").read_text())


def test_a_second_time_takes_the_place_of_the_first(
    written: Path, run: Path, dataset: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(written, tmp_path / "again")
    assert run_txl("attention", run, dataset, "--out", out, "--mem-len", 7)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == WRITTEN
    content = json.loads((out / "attention.json").read_text())
    mem_lens = content["model"]["mem_len"], content["settings"]["mem_len"]
    assert (*mem_lens, len(content["distances"])) == (7, 7, 11)
    assert (out / "attention.png").read_bytes() != (written / "attention.png").read_bytes()


def test_a_model_without_memory(dataset: Path, tmp_path: Path) -> None:
    config = replace(saving.CONFIG, mem_len=0, distance_encoding="absolute")
    reading = Reading(tgt_len=6, reset="document")
    write_exported(tmp_path / "vanilla", TransformerXL(config), None, reading)
    words = ("attention", tmp_path / "vanilla", dataset, "--out", tmp_path / "out")
    assert run_txl(*words)[0] == 0
    content = json.loads((tmp_path / "out" / "attention.json").read_text())
    assert len(content["distances"]) == 6
    assert content["heads"]["memory"] == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("--split", "nowhere"), 3, "nowhere"),
        (("--mem-len", -1), 2, "mem-len"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    run: Path, dataset: Path, tmp_path: Path, words: tuple[object, ...], code: int, named: str
) -> None:
    out = tmp_path / "out"
    found, output = run_txl("attention", run, dataset, *words, "--out", out)
    assert (found, named in output) == (code, True)
    assert not out.exists()


def test_no_model_no_data_and_an_out_that_is_a_file(
    run: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    assert run_txl("attention", tmp_path, dataset)[0] == 4
    assert run_txl("attention", run, tmp_path)[0] == 3
    code, output = run_txl("attention", run, dataset, "--out", tmp_path / "file")
    assert (code, "is a file" in output) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"
