"""Preparing gives the same bytes every time, also after kills and errors, and for any groups."""

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.data_commands import verify_dataset
from data_pipeline.shards.manifest import PrepareSettings, load_manifest, open_tokenizer
from data_pipeline.system.workers import ProcessWorkers, Progress
from data_pipeline.tokenizers import train_tokenizer
from tests.data_pipeline.preparation.preparing import (
    files_of,
    prepare,
    stop_after,
    texts_of,
    write_corpus,
)
from tests.support.corpus_layouts import write_files

Txl = Callable[..., Any]


SPLIT_AND_SHUFFLED = PrepareSettings(
    split={"valid": 0.2, "test": 0.2}, shuffle=3, shard_bytes=12_000, block_bytes=2_000
)


def test_the_same_input_and_settings_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare_dataset([corpus], tmp_path / "one", SPLIT_AND_SHUFFLED)
    elsewhere = tmp_path / "moved" / "corpus"
    shutil.copytree(corpus, elsewhere)
    for number, path in enumerate(sorted(elsewhere.rglob("*.txt"), reverse=True)):
        os.utime(path, (number, number))
    prepare_dataset([elsewhere], tmp_path / "two", SPLIT_AND_SHUFFLED)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.fault_row(35)
def test_a_second_writer_is_refused_while_the_first_writes(
    txl: Txl, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    ended = txl("prepare", corpus, "--out", out)
    os.close(held)
    assert ended.code == 3
    assert "another process is writing" in ended.err
    assert txl("prepare", corpus, "--out", out).code == 0


@pytest.mark.fault_row(11)
def test_a_full_disk_is_explained_and_leaves_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="writing shards failed: No space left"):
        prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED)
    assert not out.exists()


TWO_SHARDS = PrepareSettings(split={"valid": 0.2}, shuffle=3, block_bytes=2_000)
"""Every kind of file operation, and each as seldom as can be: the test kills at every one."""


def run_and_kill_at(event: int, corpus: Path, out: Path) -> bool:
    """Prepare in a child that SIGKILLs itself at its n-th file operation; whether it got there."""
    child = os.fork()
    if child == 0:
        left = event

        def kill(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                left -= str(out) in os.fsdecode(str(arguments[0]))
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            prepare_dataset([corpus], out, TWO_SHARDS)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.fault
@pytest.mark.fault_row(48)
@pytest.mark.parametrize("is_emptied", [False, True])
def test_after_a_kill_at_any_file_operation_a_rerun_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, is_emptied: bool
) -> None:
    """`is_emptied`: with `rm OUT/*`, which leaves hidden files."""
    prepare_dataset([corpus], tmp_path / "whole", TWO_SHARDS)
    whole = files_of(tmp_path / "whole")
    out = tmp_path / "out"
    event, published, reused = 0, 0, 0
    while run_and_kill_at(event := event + 1, corpus, out):
        if (out / "manifest.json").exists():
            assert verify_dataset(out).problems == []
            published += 1
        for path in out.glob("[!.]*") if is_emptied else ():
            path.unlink()
        reused += prepare_dataset([corpus], out, TWO_SHARDS).reused_units > 0
        assert files_of(out) == whole
        shutil.rmtree(out)
    assert event > 30
    assert published
    assert reused > event // 2


def test_the_manifest_counts_what_the_shards_hold(corpus: Path, tmp_path: Path) -> None:
    prepare_dataset([corpus], tmp_path / "out", SPLIT_AND_SHUFFLED)
    manifest = load_manifest(tmp_path / "out")
    texts = [path.read_bytes() for path in corpus.rglob("*.txt")]
    assert manifest.input.documents == manifest.input.files == 11
    assert sum(entry.documents for entry in manifest.splits.values()) == 11
    assert sum(entry.text_bytes for entry in manifest.splits.values()) == sum(map(len, texts))
    assert sum(entry.tokens for entry in manifest.splits.values()) == sum(map(len, texts)) + 11


OPTIONS = {"shuffle": 5, "split": {"valid": 0.3}, "shard_bytes": 700, "block_bytes": 512}


@pytest.mark.parametrize("kind", ["char", "word", "bpe"])
def test_a_tokenizer_trained_in_units_is_that_of_the_train_split_in_its_order(
    tmp_path: Path, kind: Any
) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(40)])
    limits = {"vocab_size": 300} if kind == "bpe" else {"min_freq": 2}
    options = PrepareSettings(tokenizer=kind, **limits, **OPTIONS)
    with ProcessWorkers(2) as workers:
        prepare(tmp_path / "in", tmp_path / "out", 900, settings=options, workers=workers)
    prepare(tmp_path / "in", tmp_path / "bytes", 900, settings=PrepareSettings(**OPTIONS))
    texts = texts_of(tmp_path / "bytes").values()
    expected = train_tokenizer(options, lambda: iter(texts))
    assert open_tokenizer(tmp_path / "out").digest == expected.digest


def test_bpe_learns_from_all_of_train_whatever_its_order_and_size(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four"]
    texts = [f"{words[number // 100]} {number} " * 20 for number in range(400)]
    write_files(tmp_path / "in", {"in.txt": "\n".join(texts)})
    given = {"format": "lines", "tokenizer": "bpe", "vocab_size": 400, "shard_bytes": 9_000}
    options = PrepareSettings.model_validate({**given, "train_bytes": 8_000})
    with ProcessWorkers(2) as workers:
        prepare(tmp_path / "in", tmp_path / "two", 900, settings=options, workers=workers)
    report = prepare(tmp_path / "in", tmp_path / "one", 10**6, settings=options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert report.manifest.splits["train"].text_bytes > 4 * options.train_bytes
    tokenizer = open_tokenizer(tmp_path / "one")
    assert [len(tokenizer.encode(f" {word}")) for word in words[1:]] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_tokenizer_is_trained_from_the_counts_of_an_interrupted_run(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "in", ["one", "two"] * 9)
    size = 300 if kind == "bpe" else None
    options = PrepareSettings(tokenizer=kind, vocab_size=size, **OPTIONS)
    prepare(tmp_path / "in", tmp_path / "whole", 10**6, settings=options)
    units = 1 + len(load_manifest(tmp_path / "whole").splits["train"].shards)
    out = tmp_path / "out"
    stop_after(units, tmp_path / "in", out, 10**6, settings=options)
    monkeypatch.setattr("data_pipeline.preparation.work_units.count_symbols", None)
    done = prepare(tmp_path / "in", out, 10**6, settings=options)
    assert done.reused_units == units, "the scan and the counts"
    assert files_of(out) == files_of(tmp_path / "whole")


def test_progress_of_counting_ends_at_its_total(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(40)])
    options = PrepareSettings(tokenizer="bpe", vocab_size=300, train_bytes=5000, **OPTIONS)
    counting = []

    def note(phase: str, done: int, total: int) -> None:
        if phase == "counting":
            counting.append((done, total))

    report = prepare(tmp_path / "in", tmp_path / "out", 900, settings=options, progress=note)
    done, total = counting[-1]
    assert done == total < report.manifest.splits["train"].text_bytes


def test_a_file_that_changes_is_refused_during_the_scan_and_read_only_once(
    corpus: Path, tmp_path: Path
) -> None:
    def rewrite_at(phase: str) -> Progress:
        def change(stage: str, done: int, total: int) -> None:
            if stage == phase and not done:
                (corpus / "10.txt").write_text("rewritten")

        return change

    prepare_dataset([corpus], tmp_path / "whole", SPLIT_AND_SHUFFLED)
    prepare_dataset([corpus], tmp_path / "out", SPLIT_AND_SHUFFLED, progress=rewrite_at("writing"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    with pytest.raises(DataError, match=r"10\.txt changed while it was being read"):
        prepare_dataset(
            [corpus], tmp_path / "new", SPLIT_AND_SHUFFLED, progress=rewrite_at("reading")
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.fault_row(50)
@pytest.mark.parametrize("damage", ["cut", "replaced", "gone", "failing"])
def test_a_disk_that_loses_or_cannot_read_the_texts_is_named_and_a_rerun_scans_again(
    corpus: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"

    def lose(stage: str, done: int, total: int) -> None:
        if stage == "writing" and not done:
            (texts,) = out.glob(".staging.tmp/units/texts-??????")
            size = texts.stat().st_size
            texts.unlink()
            if damage == "failing":
                texts.symlink_to("/proc/self/mem")  # reading there is an EIO
            elif damage != "gone":
                texts.write_bytes(b"x" * (size if damage == "replaced" else 10))

    with pytest.raises(UnfinishedError, match="texts-000000 cannot be read again"):
        prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED, progress=lose)
    prepare_dataset([corpus], out, SPLIT_AND_SHUFFLED)
    prepare_dataset([corpus], tmp_path / "whole", SPLIT_AND_SHUFFLED)
    assert files_of(out) == files_of(tmp_path / "whole")


MODULE = "data_pipeline.preparation.documents"


@pytest.mark.parametrize(("shuffle", "limits"), [(None, (1, 0)), (5, (300, 40))])
def test_the_size_of_groups_does_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: int | None, limits: tuple[int, int]
) -> None:
    write_corpus(tmp_path / "in", [f"word{n % 7} tä{n} " * (n % 5 + 1) for n in range(12)])
    settings = PrepareSettings(format="lines", shuffle=shuffle, shard_bytes=700, block_bytes=512)
    prepare_dataset([tmp_path / "in"], tmp_path / "whole", settings, max_reject_rate=1)
    for name, value in zip(("GROUP_BYTES", "MAX_SHORT_BYTES"), limits, strict=True):
        monkeypatch.setattr(f"{MODULE}.{name}", value)
    monkeypatch.setattr(f"{MODULE}.CHUNK_BYTES", 3)
    prepare_dataset([tmp_path / "in"], tmp_path / "out", settings, max_reject_rate=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(("recipe", "text"), [("wt103", " \t"), (None, "kept")])
def test_a_short_document_without_tokens_is_refused_by_name(
    tmp_path: Path, recipe: str | None, text: str
) -> None:
    write_files(tmp_path / "in", {"a.txt": "one two", "b.txt": text, "c.txt": "three"})
    settings = PrepareSettings(format="text", tokenizer="word", recipe=recipe)
    if recipe:
        with pytest.raises(DataError, match=r"b\.txt has no tokens"):
            prepare_dataset([tmp_path / "in"], tmp_path / "out", settings)
    else:
        assert prepare_dataset([tmp_path / "in"], tmp_path / "out", settings).manifest


@pytest.mark.parametrize(("tokenizer", "room"), [("byte", 12_001), ("char", 10_001)])
def test_a_document_with_more_tokens_than_a_shard_holds_is_refused_before_the_writing(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, room: int
) -> None:
    labels, settings = list[str](), PrepareSettings.model_validate({"tokenizer": tokenizer})
    options = {"settings": settings, "progress": lambda label, done, total: labels.append(label)}

    def limit(max_tokens: int) -> None:
        for module in ("preparation.prepare", "shards.shard_writer"):
            monkeypatch.setattr(f"data_pipeline.{module}.MAX_DOCUMENT_BYTES", 2 * max_tokens)

    limit(room)  # giant.txt has 12,000 bytes, 10,000 characters, and a token before them
    prepare(lines, tmp_path / "out", 500, **options)
    labels.clear()
    limit(9_999)
    with pytest.raises(DataError, match=r"giant.txt has more than 19,998 bytes.* Split its text"):
        prepare(lines, tmp_path / "refused", 500, **options)
    assert {*labels} <= {"reading", "ordering"}
