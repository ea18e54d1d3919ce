"""Work units: who does them, how often and in which order changes no byte of the dataset."""

import gzip
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.preparation.finished_units import (
    FINGERPRINT,
    RECORDS,
    FinishedFile,
    load_finished,
    record_finished,
)
from data_pipeline.preparation.prepare import PrepareReport, prepare_dataset
from data_pipeline.preparation.scan import FileRange, ScanUnit
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.preparation.work_units import Task, run_task
from data_pipeline.processes.workers import ProcessWorkers
from data_pipeline.readers import InputFile, find_files
from data_pipeline.shards.inspection import excerpts
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.verify import verify_dataset
from tests.data_pipeline.preparation.test_prepare import files_of

SETTINGS = PrepareSettings(
    split={"valid": 0.2}, shuffle=3, dedup="exact", shard_bytes=900, block_bytes=600
)


class Backwards:
    """Workers that take all units, then answer from the last to the first."""

    num_workers = 1
    peak_memory_bytes = 0

    def map(
        self, function: Callable[[Any], Any], units: Iterable[Any]
    ) -> Iterator[tuple[int, Any]]:
        for number, unit in reversed(list(enumerate(units))):
            yield number, function(unit)


def prepare(source: Path, out: Path, unit_bytes: int, **options: Any) -> PrepareReport:
    """Prepare with units of about `unit_bytes` to scan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.preparation.scan.UNIT_BYTES", unit_bytes)
        options = {"settings": SETTINGS, "max_reject_rate": 1.0, **options}
        return prepare_dataset([source], out, **options)


RAW_LINES = st.sampled_from(
    [b'{"text": "%s"}' % word for word in (b"one", b"two", b"", "täler".encode(), b"long " * 90)]
    + [b"", b"  ", b"{broken", b'{"text": "\xff"}', b'{"body": 1}', b'{"text": "cr"}\r']
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(RAW_LINES, max_size=30),
    start=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    end=st.sampled_from([b"\n", b"", b"\n\n\n", b'\n{"text": "cut']),
    unit_bytes=st.integers(1, 300),
    shuffle=st.sampled_from([None, 5]),
    split=st.sampled_from([{}, {"valid": 0.3}]),
    dedup=st.sampled_from(["none", "exact"]),
)
def test_no_byte_depends_on_how_the_input_is_cut_or_in_which_order_units_are_done(
    lines: list[bytes],
    start: bytes,
    end: bytes,
    unit_bytes: int,
    shuffle: int | None,
    split: dict[str, float],
    dedup: Any,
) -> None:
    options = PrepareSettings(
        split=split, shuffle=shuffle, dedup=dedup, shard_bytes=700, block_bytes=512
    )
    first, last = b'{"text": "first"}\n', b'\n{"text": "last"}'
    content = start + first + b"\n".join(lines) + last + end
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in"
        source.mkdir()
        (source / "a.jsonl").write_bytes(content)
        (source / "b.txt").write_text("one")
        (source / "c.jsonl").write_bytes(content.replace(b"o", b"0"))
        whole, cut = Path(folder) / "whole", Path(folder) / "cut"
        prepare(source, whole, 10**6, settings=options)
        prepare(source, cut, unit_bytes, settings=options, workers=Backwards())
        assert files_of(cut) == files_of(whole)
        assert verify_dataset(cut).problems == []


def test_lines_are_counted_from_the_file_when_a_range_is_blank(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text(" \n \n \nwords\n = Title = \n x \n")
    options = PrepareSettings(format="wikitext")
    prepare(source, tmp_path / "out", 2, settings=options)
    shown = excerpts(tmp_path / "out", documents=9)
    assert [excerpt.document_id for excerpt in shown] == ["in.txt:4", "in.txt:5"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A folder of JSON lines with repeats, and text files, one of them larger than a shard."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in ("a", "b"):
        texts = (f"document {number % 37} of {name} " * (number % 7 + 1) for number in range(60))
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in texts)
        )
    (folder / "giant.txt").write_text("grün " * 2000)
    (folder / "small.txt").write_text("document 3 of a " * 4)
    return folder


def test_any_number_of_workers_gives_the_same_bytes(lines: Path, tmp_path: Path) -> None:
    alone = prepare(lines, tmp_path / "1", 500)
    assert alone.units > 20
    assert alone.reused_units == 0
    for num_workers in (2, 3):
        with ProcessWorkers(num_workers) as workers:
            done = prepare(lines, tmp_path / f"{num_workers}", 500, workers=workers)
            assert (done.workers, done.units) == (num_workers, alone.units)
            assert 10 * 2**20 < workers.peak_memory_bytes <= done.peak_memory_bytes
            again = prepare(lines, tmp_path / f"{num_workers}", 500, workers=workers)
            assert again.already_complete
        assert files_of(tmp_path / f"{num_workers}") == files_of(tmp_path / "1")


def test_a_split_may_have_any_name(lines: Path, tmp_path: Path) -> None:
    names = ("scan", "input", "units", "spill")
    options = PrepareSettings(split=dict.fromkeys(names, 0.1))
    prepare(lines, tmp_path / "out", 500, settings=options)
    assert set(load_manifest(tmp_path / "out").splits) == {"train", *names}
    assert verify_dataset(tmp_path / "out").problems == []


def test_texts_that_must_be_spilled_give_the_same_bytes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(lines, tmp_path / "plain", 10**6)
    monkeypatch.setattr(InputFile, "rereadable", property(lambda file: file.name != "b.jsonl"))
    prepare(lines, tmp_path / "spilled", 10**6)
    assert files_of(tmp_path / "spilled") == files_of(tmp_path / "plain")


def test_of_documents_with_the_same_text_the_first_in_input_order_stays(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    texts = ["a", "b", "a", "c", "b", "a "]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    done = prepare_dataset([source], out, PrepareSettings(dedup="exact"))
    shown = excerpts(out, documents=9)
    assert [excerpt.document_id for excerpt in shown] == [f"in.jsonl:{n}" for n in (1, 2, 4, 6)]
    assert (done.manifest.input.documents, done.manifest.input.duplicates) == (6, 2)
    assert prepare_dataset([source], out, PrepareSettings(dedup="exact")).already_complete


def test_a_shard_holds_at_most_its_bytes_of_text_or_one_larger_document(
    lines: Path, tmp_path: Path
) -> None:
    prepare(lines, tmp_path / "out", 10**6)
    shards = load_manifest(tmp_path / "out").splits
    entries = [shard for entry in shards.values() for shard in entry.shards]
    assert all(entry.text_bytes <= 900 or entry.documents == 1 for entry in entries)
    assert max(entry.text_bytes for entry in entries) == 12_000
    for entry in shards.values():
        for shard, after in itertools.pairwise(entry.shards):
            assert shard.text_bytes + after.text_bytes > 900, "two that would fit in one"


class StopsAfter(Backwards):
    """Workers that are interrupted after some units."""

    def __init__(self, units: int) -> None:
        self.left = units

    def map(
        self, function: Callable[[Any], Any], units: Iterable[Any]
    ) -> Iterator[tuple[int, Any]]:
        for number, unit in enumerate(units):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield number, function(unit)


def stop_after(units: int, lines: Path, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(lines, out, 500, workers=StopsAfter(units))


@pytest.mark.parametrize("units", [1, 7, 28])
def test_a_rerun_reuses_all_that_was_finished(lines: Path, tmp_path: Path, units: int) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(lines, whole, 500)
    stop_after(units, lines, out)
    assert [path.name for path in out.iterdir()] == [".staging.tmp"]
    stop_after(0, lines, out)  # stopped before it found anything finished
    assert prepare(lines, out, 500).reused_units == units
    assert files_of(out) == files_of(whole)


def test_finished_work_of_other_settings_or_input_is_discarded_with_the_reason(
    lines: Path, tmp_path: Path
) -> None:
    out, notes = tmp_path / "out", []
    stop_after(7, lines, out)
    other = SETTINGS.model_copy(update={"shuffle": 4})
    with pytest.raises(KeyboardInterrupt):
        prepare(lines, out, 500, settings=other, note=notes.append, workers=StopsAfter(5))
    (lines / "small.txt").write_text("another")
    done = prepare(lines, out, 500, settings=other, note=notes.append)
    assert done.reused_units == 0
    assert "shuffle was 3 and is 4" in notes[1]
    assert "input files changed" in notes[3]


def compressed(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.utime(path, (1, 1))
    return path


def text_of(out: Path) -> str:
    return excerpts(out, documents=1)[0].text


def test_finished_work_of_files_of_the_same_name_size_and_time_elsewhere_is_not_reused(
    tmp_path: Path,
) -> None:
    one = compressed(tmp_path / "one" / "a.txt.gz", "abcd")
    two = compressed(tmp_path / "two" / "a.txt.gz", "dcba")
    assert one.stat().st_size == two.stat().st_size
    out, settings = tmp_path / "out", PrepareSettings()
    with pytest.raises(KeyboardInterrupt):
        prepare(one, out, 500, settings=settings, workers=StopsAfter(1))
    assert prepare(two, out, 500, settings=settings).reused_units == 0
    assert text_of(out) == "dcba"


@pytest.mark.parametrize("mark", ["", "a time or tag"])
def test_a_scan_of_texts_that_are_spilled_is_reused_only_with_a_version_mark(
    tmp_path: Path, mark: str
) -> None:
    source = compressed(tmp_path / "in" / "a.txt.gz", "abcd")
    file = InputFile(str(source), "a.txt.gz", "text", "gz", source.stat().st_size, mark)
    (tmp_path / RECORDS).mkdir()
    (tmp_path / RECORDS / FINGERPRINT).write_text("same")
    task = Task(ScanUnit(0, (FileRange(0, file, 0, file.size),), "text"), tmp_path, "same")
    assert [run_task(task).reused for _ in range(2)] == [False, bool(mark)]


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


def test_a_worker_that_does_not_see_the_staging_folder_is_refused(
    lines: Path, tmp_path: Path
) -> None:
    class Elsewhere(Backwards):
        def map(self, function: Any, units: Iterable[Any]) -> Iterator[tuple[int, Any]]:
            for number, task in enumerate(units):
                shutil.rmtree(task.staging)  # as on a machine that has another disk there
                yield number, function(task)

    with pytest.raises(DataError, match=r"does not see .* path that all machines share"):
        prepare(lines, tmp_path / "out", 500, workers=Elsewhere())


def test_memory_for_a_document_is_what_its_columns_say(lines: Path, tmp_path: Path) -> None:
    from data_pipeline.preparation.input_index import InputIndex
    from data_pipeline.preparation.scan import plan_scan, scan

    files = find_files([str(lines)], format="auto", exclude=tmp_path / "out").files
    units = plan_scan(files, "text")
    corpus = InputIndex(files, units)
    corpus.fill(lambda number: scan(units[number]))
    columns = [value for value in vars(corpus).values() if isinstance(value, np.ndarray)]
    per_document = [array.nbytes for array in columns if len(array) == len(corpus)]
    assert sum(per_document) == 52 * len(corpus)


def test_input_that_is_nothing_but_rejects_ends_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xff\n" * 20)
    monkeypatch.setattr("data_pipeline.preparation.scan.MAX_REJECTS", 19)
    with pytest.raises(DataError, match=r"more than 19 records near byte 0 .* not lines"):
        prepare_dataset(
            [tmp_path / "in.txt"],
            tmp_path / "out",
            PrepareSettings(format="lines"),
            max_reject_rate=1,
        )
