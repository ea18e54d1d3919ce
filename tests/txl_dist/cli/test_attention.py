"""`txl attention`: a table, a strict file that reads back, two plots; an error leaves nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.settings import PrepareSettings
from tests.txl_dist.checkpoint import saving
from tests.txl_dist.convert.example_files import run_txl
from txl_dist.convert.single_file import write_exported
from txl_dist.errors import DataError
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.reporting.attention_file import load_attention

WRITTEN = ["attention.json", "attention.png", "attention.svg"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    (folder / "corpus").mkdir()
    for number in range(4):
        text = f"{number}: the tide comes in, the tide goes out. " * (number + 1)
        (folder / "corpus" / f"{number}.txt").write_text(text)
    prepare_dataset([folder / "corpus"], folder / "data", PrepareSettings(split={"valid": 0.5}))
    return folder / "data"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("attention") / "run"
    saving.save(run, step=2)
    return run


@pytest.fixture(scope="module")
def written(run: Path, dataset: Path) -> Path:
    out = run / "attention"
    code, told = run_txl("attention", run, dataset, "--out", out, "--max-tokens", 40)
    assert code == 0, told
    assert "39 queries, segment 4, memory 5" in told
    return out


def test_it_writes_data_and_plots_and_says_where(written: Path, run: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == WRITTEN
    stored = load_attention(written / "attention.json")
    assert (stored.num_queries, stored.distances) == (39, tuple(range(9)))
    assert (stored.model, stored.settings.max_tokens) == (saving.CONFIG, 40)
    assert Path(stored.checkpoint).parent == run / "checkpoints"
    assert stored.attention.heads.by_distance_LHD.shape == (2, 3, 9)
    assert stored.attention.tgt_len == 4


def test_json_is_the_file(written: Path, run: Path, dataset: Path) -> None:
    code, told = run_txl("attention", run, dataset, "--json", "--max-tokens", 40)
    assert code == 0
    assert json.loads(told) == json.loads((written / "attention.json").read_text())


def test_a_second_time_takes_the_place_of_the_first(
    written: Path, run: Path, dataset: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(written, tmp_path / "again")
    assert run_txl("attention", run, dataset, "--out", out, "--mem-len", 7, "--batch", 3)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == WRITTEN
    stored = load_attention(out / "attention.json")
    assert (stored.model.mem_len, stored.settings.mem_len, len(stored.distances)) == (7, 7, 11)
    assert (out / "attention.png").read_bytes() != (written / "attention.png").read_bytes()


def test_a_model_without_memory(dataset: Path, tmp_path: Path) -> None:
    config = replace(saving.CONFIG, mem_len=0, distance_encoding="absolute")
    write_exported(tmp_path / "vanilla", TransformerXL(config), None)
    words = ("attention", tmp_path / "vanilla", dataset, "--tgt-len", 6, "--out", tmp_path / "out")
    assert run_txl(*words)[0] == 0
    stored = load_attention(tmp_path / "out" / "attention.json")
    assert len(stored.distances) == 6
    assert set(sum(stored.heads.memory, ())) == {0.0}


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("--split", "nowhere"), 3, "nowhere"),
        (("--max-tokens", 1), 2, "max-tokens"),
        (("--mem-len", -1), 2, "mem-len"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    run: Path, dataset: Path, tmp_path: Path, words: tuple[object, ...], code: int, named: str
) -> None:
    out = tmp_path / "out"
    found, told = run_txl("attention", run, dataset, *words, "--out", out)
    assert (found, named in told) == (code, True)
    assert not out.exists()


def test_no_model_no_data_and_an_out_that_is_a_file(
    run: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    assert run_txl("attention", tmp_path, dataset)[0] == 4
    assert run_txl("attention", run, tmp_path)[0] == 3
    code, told = run_txl("attention", run, dataset, "--out", tmp_path / "file")
    assert (code, "is a file" in told) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"


def spoil(content: dict[str, Any], *path: str | int, value: Any) -> None:
    *above, last = path
    for key in above:
        content = content[key]  # type: ignore[assignment,index,call-overload]
    content[last] = value  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("version",), 2, "version"),
        (("extra",), 1, "extra"),
        (("settings", "extra"), 1, "settings.extra"),
        (("num_queries",), 0, "num_queries"),
        (("num_queries",), "39", "num_queries"),
        (("distances",), [0, 1], "distances"),
        (("heads", "by_distance", 1, 2, 0), 0.9, "layer 1, head 2"),
        (("heads", "by_distance", 1, 2, 0), float("nan"), "heads.by_distance.1.2.0"),
        (("heads", "by_distance", 1, 2), [1.0], "layer 1, head 2"),
        (("heads", "by_distance"), [], "heads a layer"),
        (("heads", "segment", 0, 1), 0.0, "layer 0, head 1"),
        (("heads", "mean_distance"), [], "mean_distance"),
        (("even", "memory", 0, 0), -0.1, "even.memory.0.0"),
        (("model", "n_head"), 4, "heads a layer"),
    ],
)
def test_an_edited_file_is_refused_by_name(
    written: Path, tmp_path: Path, path: tuple[str | int, ...], value: Any, named: str
) -> None:
    content = json.loads((written / "attention.json").read_text())
    spoil(content, *path, value=value)
    (tmp_path / "attention.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=named):
        load_attention(tmp_path / "attention.json")


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_such_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "attention.json").write_bytes(damage)
    with pytest.raises(DataError, match="txl attention"):
        load_attention(tmp_path / "attention.json")
    with pytest.raises(DataError, match="cannot be read"):
        load_attention(tmp_path / "absent.json")


def test_weights_read_back_are_those_that_were_written(written: Path) -> None:
    stored = load_attention(written / "attention.json")
    heads = stored.attention.heads
    torch.testing.assert_close(
        heads.mean_distance, torch.tensor(stored.heads.mean_distance).double()
    )
    assert heads.by_distance_LHD.tolist() == [
        [list(row) for row in rows] for rows in stored.heads.by_distance
    ]
