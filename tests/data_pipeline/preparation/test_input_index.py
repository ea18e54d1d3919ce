"""Memory of the index per document and per reject."""

import tracemalloc
from pathlib import Path

import numpy as np

from data_pipeline.preparation.input_index import InputIndex
from data_pipeline.preparation.scan import plan_scan, scan
from data_pipeline.readers import find_files


def test_memory_does_not_grow_with_the_number_of_rejects(tmp_path: Path) -> None:
    number = 20_000
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x\n" * number)
    files = find_files([str(source)], format="auto", exclude=tmp_path / "out").files
    units = plan_scan(files, "text")
    (scan_result,) = (scan(unit) for unit in units)
    with (tmp_path / "rejects").open("wb") as listed:
        tracemalloc.start()
        corpus = InputIndex(files, units, listed)
        corpus.fill(lambda _: scan_result)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert corpus.rejected == number
    assert held_bytes < number
    assert len((tmp_path / "rejects").read_bytes().splitlines()) == number


def test_the_index_takes_52_bytes_per_document(lines: Path, tmp_path: Path) -> None:
    from data_pipeline.preparation.input_index import InputIndex
    from data_pipeline.preparation.scan import plan_scan, scan

    files = find_files([str(lines)], format="auto", exclude=tmp_path / "out").files
    units = plan_scan(files, "text")
    corpus = InputIndex(files, units)
    corpus.fill(lambda number: scan(units[number]))
    columns = [value for value in vars(corpus).values() if isinstance(value, np.ndarray)]
    per_document = [array.nbytes for array in columns if len(array) == len(corpus)]
    assert sum(per_document) == 52 * len(corpus)
