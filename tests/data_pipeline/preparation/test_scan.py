"""No byte depends on how the input is cut into scan units; memory of the index."""

import gzip
import io
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.preparation.documents import _COLUMNS
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.scan import InputIndex, plan_scan, scan
from data_pipeline.shards.data_commands import excerpts, verify_dataset
from data_pipeline.shards.manifest import PrepareSettings, load_manifest
from data_pipeline.system.sources import counting_bytes
from tests.data_pipeline.preparation.preparing import Backwards, files_of, prepare, write_corpus
from tests.data_pipeline.readers.reading import find

TEXTS = st.sampled_from(["one", "two words", "täler 潮", "a\nline\n\nor two", "long " * 90, " = x"])
RAW_LINES = st.sampled_from(
    [b'{"text": "%s"}' % word for word in (b"one", b"", "täler".encode(), b"long " * 90)]
    + [b"", b"  ", b"{broken", b'{"text": "\xff"}', b'{"body": 1}', b'{"text": "cr"}\r']
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=8),
    raw_lines=st.lists(RAW_LINES, max_size=20),
    unit_bytes=st.integers(10, 900),
    kind=st.sampled_from(["byte", "char", "word"]),
    format=st.sampled_from(["auto", "lines"]),
    shuffle=st.sampled_from([None, 5]),
    split=st.sampled_from([{}, {"valid": 0.3}]),
    dedup=st.sampled_from(["none", "exact"]),
)
def test_no_byte_depends_on_how_the_input_is_cut_or_in_which_order_units_are_done(
    texts: list[str],
    raw_lines: list[bytes],
    unit_bytes: int,
    kind: Any,
    format: str,
    shuffle: int | None,
    split: dict[str, float],
    dedup: Any,
) -> None:
    options = PrepareSettings(
        tokenizer=kind,
        format=format,
        shuffle=shuffle,
        split=split,
        dedup=dedup,
        shard_bytes=700,
        block_bytes=512,
    )
    with tempfile.TemporaryDirectory() as folder:
        source, whole, cut = (Path(folder) / name for name in ("in", "whole", "cut"))
        write_corpus(source, texts)
        (source / "raw.jsonl").write_bytes(b"\n".join(raw_lines))
        prepare(source, whole, 10**7, settings=options)
        prepare(source, cut, unit_bytes, settings=options, workers=Backwards())
        assert files_of(cut) == files_of(whole)
        assert verify_dataset(cut).problems == []
        ids = [shown.document_id for shown in excerpts(cut, documents=10**6)]
        assert len(set(ids)) == len(ids)


def test_every_format_gives_the_texts_that_were_put_in(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", ["one", "täler 潮", "a\nb"])
    prepare(tmp_path / "in", tmp_path / "out", 30, settings=PrepareSettings())
    shown = {each.document_id: each.text for each in excerpts(tmp_path / "out", documents=99)}
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "g.parquet"):
        assert [shown[f"{name}:{line}"] for line in (1, 2)] == ["one", "täler 潮"]
    assert shown["f.txt.zst"].startswith("one|täler 潮|a")
    assert "e.txt.gz" not in shown, "it is truncated"
    assert load_manifest(tmp_path / "out").input.rejected == 3


def test_lines_are_counted_from_the_file_when_a_range_is_blank(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("\n\n\n\n\n\nwords\nmore\n")
    options = PrepareSettings(format="lines")
    prepare(source, tmp_path / "out", 2, settings=options)
    shown = excerpts(tmp_path / "out", documents=9)
    assert [excerpt.document_id for excerpt in shown] == ["in.txt:7", "in.txt:8"]


def test_an_input_of_rejects_only_ends_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xff\n" * 20)
    monkeypatch.setattr("data_pipeline.preparation.scan.MAX_REJECTS", 19)
    with pytest.raises(DataError, match=r"more than 19 records cannot .* not lines"):
        prepare_dataset(
            [tmp_path / "in.txt"],
            tmp_path / "out",
            PrepareSettings(format="lines"),
            max_reject_rate=1,
        )


class Recorder:
    """A counter that keeps all its values."""

    def __init__(self) -> None:
        self.values = [0]

    @property
    def value(self) -> int:
        return self.values[-1]

    @value.setter
    def value(self, value: int) -> None:
        self.values.append(value)


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz", "in.txt.zst"])
def test_the_bytes_of_one_long_document_are_counted_while_it_is_read(
    tmp_path: Path, name: str
) -> None:
    text = np.random.default_rng(0).integers(32, 127, 5 * 2**20, np.uint8).tobytes()
    packed = {"txt": text, "gz": gzip.compress(text, 1), "zst": zstandard.compress(text)}
    path = tmp_path / name
    path.write_bytes(packed[name.rpartition(".")[2]])
    files = find(path).files
    (unit,) = plan_scan(files, "text")
    reading = Recorder()
    with counting_bytes(reading):
        scan(unit, io.BytesIO())
    assert reading.value == unit.size == path.stat().st_size
    assert len(reading.values) > 4, "more than a value per document"


def test_memory_does_not_grow_with_the_number_of_rejects(tmp_path: Path) -> None:
    number = 20_000
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x\n" * number)
    files = find(source).files
    units = plan_scan(files, "text")
    (scan_result,) = (scan(unit, io.BytesIO()) for unit in units)
    with (tmp_path / "rejects").open("wb") as listed:
        tracemalloc.start()
        corpus = InputIndex(files, units, [scan_result], listed)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert corpus.rejected == number
    assert held_bytes < number
    assert len((tmp_path / "rejects").read_bytes().splitlines()) == number


def test_the_index_takes_48_bytes_per_document(lines: Path, tmp_path: Path) -> None:
    files = find(lines).files
    units = plan_scan(files, "text")
    scans = (scan(unit, io.BytesIO()) for unit in units)
    documents = InputIndex(files, units, scans, io.BytesIO()).documents
    columns = [getattr(documents, name) for name in _COLUMNS]
    assert sum(column.nbytes for column in columns) == 48 * len(documents)
