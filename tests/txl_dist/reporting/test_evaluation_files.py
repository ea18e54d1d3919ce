"""The files of `txl eval --out`, without the command (`tests/txl_dist/cli/test_evaluate.py`)."""

import csv
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.system.files import StagedDirectory
from txl_dist.reporting.evaluation_files import RESULT_NAME, write_evaluation
from txl_dist.reporting.evaluation_plot import plot_sweep, plot_table


def scored(**changes: Any) -> dict[str, Any]:
    rows = [
        {"from": 0, "to": 0, "tokens": 2, "nats": 6.0, "nats_per_token": 3.0},
        {"from": 2, "to": 3, "tokens": 1, "nats": 2.0, "nats_per_token": 2.0},
    ]
    return {
        "checkpoint": "runs/a_$b/step-00000010",
        "split": "valid",
        "weights": "last",
        "tgt_len": 8,
        "mem_len": 4,
        "clamp_len": None,
        "same_length": False,
        "perplexity": 9.0,
        "details": {
            "token_frequency_counted_on": "train",
            "by_document_position": rows,
            "by_segment_position": rows,
            "by_token_frequency": rows,
        },
        **changes,
    }


def write(directory: Path, objects: list[dict[str, Any]]) -> dict[str, bytes]:
    with StagedDirectory(directory, last=RESULT_NAME) as staged:
        names = write_evaluation(staged, objects, objects)
    assert {path.name for path in directory.iterdir()} == set(names)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_files_are_the_same_bytes_every_time_and_replace_earlier_ones(tmp_path: Path) -> None:
    objects = [scored(), scored(split="test", mem_len=0)]
    files = write(tmp_path / "one", objects)
    (tmp_path / "one" / "sweep.png").touch()  # of an earlier sweep
    assert files == write(tmp_path / "one", objects)
    rows = list(csv.DictReader(files["by_document_position.csv"].decode().splitlines()))
    assert [(row["split"], row["mem_len"], row["from"], row["nats"]) for row in rows] == [
        ("valid", "4", "0", "6.0"),
        ("valid", "4", "2", "2.0"),
        ("test", "0", "0", "6.0"),
        ("test", "0", "2", "2.0"),
    ]
    plain = scored()
    del plain["details"]
    assert set(write(tmp_path / "one", [plain])) == {"result.json", "scores.csv"}


def test_the_lines_of_a_plot_are_named_by_what_differs() -> None:
    figure = plot_table("token_frequency", [scored(), scored(mem_len=0)])
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["mem_len 4", "mem_len 0"]
    assert axes.get_xlabel() == "occurrences of the target's id in split train"


def test_a_sweep_is_plotted_against_the_option_with_most_values() -> None:
    objects = [
        scored(
            mem_len=mem_len, clamp_len=clamp_len, perplexity=float(mem_len), selected=not mem_len
        )
        for mem_len in (640, 0, 128)
        for clamp_len in (None, 400)
    ]
    objects.append(scored(split="test", selected=True))
    (axes,) = plot_sweep(objects, ["clamp_len", "mem_len"]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "128", "640"]
    *lines, selected = axes.lines
    assert [line.get_label() for line in lines] == ["clamp_len none", "clamp_len 400"]
    for line in lines:
        assert list(line.get_ydata()) == [0.0, 128.0, 640.0]
    assert list(selected.get_xdata()) == [0, 0]


@pytest.mark.parametrize("count", [1, 30])
def test_any_number_of_results_can_be_drawn(count: int) -> None:
    figure = plot_table("segment_position", [scored(mem_len=number) for number in range(count)])
    assert len(figure.axes[0].lines) == count
