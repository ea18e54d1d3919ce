"""Finished units are reused if input, settings and tokenizer are the same and the files intact."""

import hashlib
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.preparation.staging import (
    FINGERPRINT,
    RECORDS,
    FinishedFile,
    load_finished,
    record_finished,
)
from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.verify import excerpts
from data_pipeline.system.files import STAGING
from data_pipeline.tokenizers import load_tokenizer, train_tokenizer
from tests.data_pipeline.preparation.preparing import (
    SETTINGS,
    StopsAfter,
    compressed,
    files_of,
    prepare,
    stop_after,
    write_corpus,
)


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


OPTIONS = {"shuffle": 5, "split": {"valid": 0.3}, "shard_bytes": 700, "block_bytes": 512}


def test_finished_work_of_another_tokenizer_file_is_not_used(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", ["one", "two"] * 9)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(paths, ("one two", "three four"), strict=True):
        char = train_tokenizer(PrepareSettings(tokenizer="char"), lambda text=text: iter([text]))
        path.write_text(char.to_json())
    options = {"settings": PrepareSettings(tokenizer="file", **OPTIONS)}
    out, notes = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        prepare(
            tmp_path / "in",
            out,
            99,
            tokenizer_file=paths[0],
            workers=StopsAfter(5),
            **options,
        )
    done = prepare(tmp_path / "in", out, 99, tokenizer_file=paths[1], note=notes.append, **options)
    assert "discarding the unfinished work" in notes[1]
    assert done.reused_units == 0
    assert load_manifest(out).tokenizer_digest == load_tokenizer(paths[1]).digest
    with pytest.raises(DataError, match="holds another dataset: tokenizer: "):
        prepare(tmp_path / "in", out, 99, tokenizer_file=paths[0], **options)
    assert prepare(tmp_path / "in", out, 99, tokenizer_file=paths[1], **options).already_complete


def test_finished_work_of_other_settings_or_input_is_discarded(lines: Path, tmp_path: Path) -> None:
    out, notes = tmp_path / "out", []
    stop_after(7, lines, out)
    other = SETTINGS.model_copy(update={"shuffle": 4})
    with pytest.raises(KeyboardInterrupt):
        prepare(lines, out, 500, settings=other, note=notes.append, workers=StopsAfter(5))
    (lines / "small.txt").write_text("another")
    done = prepare(lines, out, 500, settings=other, note=notes.append)
    assert done.reused_units == 0
    assert "discarding the unfinished work" in notes[1]
    assert "discarding the unfinished work" in notes[3]


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_finished_work_with_a_damaged_fingerprint_is_discarded(
    lines: Path, tmp_path: Path, content: bytes
) -> None:
    out, notes = tmp_path / "out", []
    stop_after(7, lines, out)
    (out / STAGING / RECORDS / FINGERPRINT).write_bytes(content)
    done = prepare(lines, out, 500, note=notes.append)
    assert done.reused_units == 0
    assert "discarding the unfinished work" in notes[1]


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
