"""The bytes of a dataset do not depend on which worker executes a unit, how often, or the order."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.documents import RECORDS
from data_pipeline.preparation.output import FINGERPRINT
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.scan import FileRange, ScanUnit
from data_pipeline.preparation.work_units import run_unit, tokenize_document
from data_pipeline.readers import InputFile
from data_pipeline.shards.data_commands import verify_dataset
from data_pipeline.shards.manifest import PrepareSettings, load_manifest
from data_pipeline.system.workers import ProcessWorkers
from data_pipeline.tokenizers import ByteTokenizer, load_tokenizer, train_tokenizer
from tests.data_pipeline.preparation.preparing import (
    Backwards,
    StopsAfter,
    compressed,
    files_of,
    prepare,
    tokens_of,
)
from tests.data_pipeline.tokenizers.sample_tokenizers import with_unknown_as_only_special


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
    names = ("scan", "input", "units", "texts")
    options = PrepareSettings(split=dict.fromkeys(names, 0.1))
    prepare(lines, tmp_path / "out", 500, settings=options)
    assert set(load_manifest(tmp_path / "out").splits) == {"train", *names}
    assert verify_dataset(tmp_path / "out").problems == []


@pytest.mark.parametrize("mark", ["", "a time or tag"])
def test_a_scan_is_reused_only_with_a_version_mark(tmp_path: Path, mark: str) -> None:
    source = compressed(tmp_path / "in" / "a.txt.gz", "abcd")
    size = source.stat().st_size
    file = InputFile(str(source), "a.txt.gz", size, mark, kind="text", archive="c.zip")
    (tmp_path / RECORDS).mkdir()
    (tmp_path / RECORDS / FINGERPRINT).write_text("same")
    unit = ScanUnit(0, (FileRange(0, file, 0, file.size),), "text")
    reused = [run_unit(tmp_path, "same", unit).reused for _ in range(2)]
    assert reused == [False, bool(mark)]


def test_a_worker_that_does_not_see_the_staging_folder_is_refused(
    lines: Path, tmp_path: Path
) -> None:
    class Elsewhere(Backwards):
        def map(self, function: Any, units: Iterable[Any]) -> Iterator[tuple[int, Any]]:
            for number, unit in enumerate(units):
                shutil.rmtree(function.args[0])  # as on a machine that has another disk there
                yield number, function(unit)

    with pytest.raises(DataError, match=r"does not see .* path that all machines share"):
        prepare(lines, tmp_path / "out", 500, workers=Elsewhere())


def test_a_giant_run_of_blanks_is_tokenized(tmp_path: Path) -> None:
    train = PrepareSettings(tokenizer="bpe", vocab_size=300)
    tokenizer = train_tokenizer(train, lambda: iter(["some text  to train on " * 9]))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    text = "a" + " " * 1_030_000 + "b" * 1_200_000
    (tmp_path / "in.txt").write_text(text)
    out = tmp_path / "out"
    options = PrepareSettings(tokenizer="file")
    prepare_dataset([tmp_path / "in.txt"], out, options, tokenizer_file=tmp_path / "tokenizer.json")
    assert [tokenizer.decode(ids) for ids in tokens_of(out)] == [text]


def test_a_document_that_holds_the_end_of_document_token_is_refused_by_name() -> None:
    content = json.loads(with_unknown_as_only_special("bpe").to_str())
    tokenizer = load_tokenizer(
        {"type": "file", "version": 1, "end_of_document": 0, "tokenizer": content}
    )
    assert len(list(tokenize_document(tokenizer, ["the cat sat"], document_id="a.txt"))) == 2
    with pytest.raises(DataError, match=r"b\.txt contains text .* end-of-document token, id 0"):
        list(tokenize_document(tokenizer, ["the cat 漢 sat"], document_id="b.txt"))


def test_a_long_text_that_needs_much_memory_is_named_before_it_is_read(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.preparation.prepare.LARGE_TEXT_BYTES", 1000)
    monkeypatch.setattr("data_pipeline.preparation.prepare.RAM_PER_TEXT_BYTE", 2**20)
    content = json.loads(with_unknown_as_only_special("bpe").to_str())
    description = {"type": "file", "version": 1, "end_of_document": 0, "tokenizer": content}
    (tmp_path / "whole.json").write_text(json.dumps(description))
    (tmp_path / "byte.json").write_text(ByteTokenizer().to_json())
    expected = "giant.txt is one document, and this tokenizer encodes documents as a whole: expect"
    for name in ("whole", "byte"):
        options = {"settings": PrepareSettings(tokenizer="file"), "workers": StopsAfter(0)}
        said, file = list[str](), tmp_path / f"{name}.json"
        with pytest.raises(KeyboardInterrupt):
            prepare(lines, tmp_path / name, 500, tokenizer_file=file, note=said.append, **options)
        assert (f"{expected} 12 GiB of RAM" in "\n".join(said)) == (name == "whole")
