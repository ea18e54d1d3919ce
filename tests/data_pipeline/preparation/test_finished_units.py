"""Finished units are reused if their files are intact."""

import hashlib
from pathlib import Path

import pytest

from data_pipeline.preparation.finished_units import (
    RECORDS,
    FinishedFile,
    load_finished,
    record_finished,
)
from tests.data_pipeline.preparation.preparing import files_of, prepare, stop_after


@pytest.mark.parametrize("units", [1, 7, 28])
def test_a_rerun_reuses_all_that_was_finished(lines: Path, tmp_path: Path, units: int) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(lines, whole, 500)
    stop_after(units, lines, out)
    assert [path.name for path in out.iterdir()] == [".staging.tmp"]
    stop_after(0, lines, out)  # stopped before it found anything finished
    assert prepare(lines, out, 500).reused_units == units
    assert files_of(out) == files_of(whole)


@pytest.mark.parametrize("name", ["units/input-000001.scan.safetensors", "train-000000.tar.zst"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_finished_file_that_was_damaged_is_made_again(
    lines: Path, tmp_path: Path, name: str, damage: str
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(lines, whole, 500)
    stop_after(31, lines, out)
    path = out / ".staging.tmp" / name
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-1])
    if damage == "missing":
        path.unlink()
    assert prepare(lines, out, 500).reused_units == 30
    assert files_of(out) == files_of(whole)


def test_a_record_counts_only_for_the_unit_that_it_was_written_for(tmp_path: Path) -> None:
    (tmp_path / RECORDS).mkdir()
    (tmp_path / "a").write_bytes(b"abc")
    sums = [FinishedFile("a", 3, hashlib.sha256(b"abc").hexdigest())]
    record_finished(tmp_path, "unit", "key", result={"tokens": 1}, files=sums)
    assert load_finished(tmp_path, "unit", "key") == {"tokens": 1}
    assert load_finished(tmp_path, "unit", "another key") is None
    (tmp_path / RECORDS / "unit.json").write_text('{"key": "key", "files": [')
    assert load_finished(tmp_path, "unit", "key") is None
